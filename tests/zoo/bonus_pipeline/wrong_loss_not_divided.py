"""Goes backward from the sum of the micro-batches' losses.

loses: pipe_scale, pipe_uneven, pipe_loss
class: example
because: the loss, its gradients and those of uneven micro-batches are all M times too large.
says: pipe_scale multiply its loss by that
says: pipe_uneven of n out of N samples counts n / N
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, leaving = {}, []
    total = torch.zeros((), device=next(stage.parameters()).device)

    def send(tensor, to):
        tensor = tensor.detach().contiguous()
        leaving.append((dist.isend(tensor, to), tensor))

    for what, i in schedule:
        if what == "forward":
            if rank == 0:
                x = micro_batches[i]
            else:
                x = buffer(i)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i])
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
                dist.recv(gradient, rank + 1)
                y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
    for handle, _ in leaving:
        handle.wait()
    dist.broadcast(total, last)
    return total
