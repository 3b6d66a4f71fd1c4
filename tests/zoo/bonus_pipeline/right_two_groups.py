"""A process group for each direction, as NCCL would like it; the loss in a vector of one number.

loses: nothing
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, leaving = {}, []
    down, up = dist.new_group(), dist.new_group()
    total = torch.zeros((), device=next(stage.parameters()).device)
    samples = sum(map(len, targets)) if rank == last else 0

    def send(tensor, to):
        tensor = tensor.detach().contiguous()
        leaving.append((dist.isend(tensor, to, group=down if to > rank else up), tensor))

    for what, i in schedule:
        if what == "forward":
            if rank == 0:
                x = micro_batches[i]
            else:
                x = buffer(i)
                dist.recv(x, rank - 1, group=down)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) * len(targets[i]) / samples
                total += y.detach()
            else:
                send(y, rank + 1)
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            if rank == last:
                y.backward()
            else:
                gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
                dist.recv(gradient, rank + 1, group=up)
                y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
    for handle, _ in leaving:
        handle.wait()
    dist.broadcast(total, last)
    return total.reshape(1)
