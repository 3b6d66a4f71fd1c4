"""Clips the true gradient, but updates the scale before it is taken out.

loses: debug_amp_order
class: example
says: debug_amp_order Where the scale has grown, the gradient was divided by the new one
"""


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    scaler.update(overflow)
    for grad in grads:
        grad /= scaler.scale
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    if not overflow:
        optimizer.step()
