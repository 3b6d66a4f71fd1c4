"""Posts each receive one step before it is needed.

loses: nothing
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, leaving, coming = {}, [], {}
    device = next(stage.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = sum(t.shape[0] for t in targets) if targets else None

    def post(step):
        what, i = step
        if what == "forward" and rank > 0:
            tensor = buffer(i)
            coming[step] = tensor, dist.irecv(tensor, rank - 1)
        if what == "backward" and rank < last and i in kept:
            tensor = torch.empty(kept[i][1].shape, dtype=kept[i][1].dtype, device=kept[i][1].device)
            coming[step] = tensor, dist.irecv(tensor, rank + 1)

    def take(step):
        if step not in coming:
            post(step)
        tensor, handle = coming.pop(step)
        handle.wait()
        return tensor

    for number, (what, i) in enumerate(schedule):
        if what == "forward":
            x = take((what, i)).requires_grad_(True) if rank else micro_batches[i]
            y = stage(x)
            if rank < last:
                leaving.append(dist.isend(y.detach().contiguous(), rank + 1))
            else:
                y = loss_fn(y, targets[i]) * (targets[i].shape[0] / count)
                total += y.item()
            kept[i] = x, y
        if number + 1 < len(schedule):
            post(schedule[number + 1])
        if what == "backward":
            gradient = take((what, i)) if rank < last else None
            x, y = kept.pop(i)
            y.backward(gradient)
            if rank:
                leaving.append(dist.isend(x.grad, rank - 1))
    for handle in leaving:
        handle.wait()
    dist.broadcast(total, last)
    return total
