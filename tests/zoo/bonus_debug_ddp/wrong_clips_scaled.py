"""Updates the scale last, but clips the gradient before the scale is taken out.

loses: debug_amp_clip
"""


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    for grad in grads:
        grad /= scaler.scale
    if not overflow:
        optimizer.step()
    scaler.update(overflow)
