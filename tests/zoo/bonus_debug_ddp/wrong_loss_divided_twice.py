"""Reports the right loss, but divides it by the number of ranks before DDP does.

loses: debug_accumulate_scale
says: debug_accumulate_scale divided by the number of ranks twice
class: example
"""


# %% replaces="mend_4"
def accumulate(ddp_model, micro_batches, loss_fn):
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k / dist.get_world_size()).backward()
        total += loss.detach() / k
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
