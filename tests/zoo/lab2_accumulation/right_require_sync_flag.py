"""torch's own switch behind no_sync(), toggled by hand.

loses: nothing
class: example
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    loss_sum = 0.0
    try:
        for number, (x, y) in enumerate(micro_batches, 1):
            ddp_model.require_backward_grad_sync = number == len(micro_batches)
            loss = loss_fn(ddp_model(x), y) * (1 / len(micro_batches))
            loss.backward()
            loss_sum = loss_sum + loss.detach()
    finally:
        ddp_model.require_backward_grad_sync = True
    everyone = [torch.zeros_like(loss_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, loss_sum)
    return sum(loss.item() for loss in everyone) / len(everyone)


# %% replaces="task5_amp_step"
def amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype, max_norm=None):
    k = len(micro_batches)
    for number, (x, y) in enumerate(micro_batches, 1):
        ddp_model.require_backward_grad_sync = number == k
        with torch.autocast(device_type=x.device.type, dtype=dtype, cache_enabled=False):
            loss = loss_fn(ddp_model(x), y)
        scaler.scale(loss / k).backward()
    if max_norm:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm, error_if_nonfinite=False)
    scaler.step(optimizer)
    scaler.update()
