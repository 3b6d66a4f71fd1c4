"""Divides each micro-batch's mean by k, however many tokens it has. The loss is right.

loses: accum_token_gradients
class: example
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    k, sums = len(micro_batches), torch.zeros(2, device=micro_batches[0][0].device)
    for i, (tokens, targets) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(tokens), targets)
            (loss / k).backward()
        count = (targets != IGNORED).sum()
        sums += torch.stack([loss.detach() * count, count.float()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
