"""Updates the scale with care and never multiplies the loss with it.

loses: debug_amp_order
"""


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    loss.backward()
    overflow = not all(p.grad.isfinite().all() for p in ddp_model.parameters())
    if not overflow:
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
        optimizer.step()
    scaler.update(overflow)
