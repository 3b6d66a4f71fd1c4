"""Clips the scaled gradient to the scaled limit, and remembers the scale before it is updated.

loses: nothing
"""


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    scale = scaler.scale
    ddp_model.zero_grad(set_to_none=False)
    loss.mul(scale).backward()
    norm = nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm * scale)
    scaler.update(not norm.isfinite().item())
    if norm.isfinite():
        torch._foreach_div_([p.grad for p in ddp_model.parameters()], scale)
        optimizer.step()
