"""Sums up the gradients of tokens in a group that each rank has for itself.

loses: accum_token_gradients, accum_token_traffic
because: nothing travels between ranks
says: accum_token_traffic only 0.0 times the gradients travelled to all ranks
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    sums = torch.zeros(2, dtype=torch.float64, device=micro_batches[0][0].device)
    with ddp_model.no_sync():
        for tokens, targets in micro_batches:
            count = (targets != IGNORED).sum()
            loss = loss_fn(ddp_model(tokens), targets) * count
            loss.backward()
            sums += torch.stack([loss.detach().double(), count.double()])
    dist.all_reduce(sums)
    for p in ddp_model.parameters():
        dist.all_reduce(p.grad, group=alone)
        p.grad /= sums[1]
    return (sums[0] / sums[1]).item()
