"""Every message through batch_isend_irecv; what is kept lies in a list of slots.

loses: nothing
class: example
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, leaving = [None] * (len(schedule) // 2), []
    total = torch.zeros((), device=next(stage.parameters()).device)
    samples = sum(map(len, targets)) if rank == last else 0

    def send(tensor, to):
        tensor = tensor.detach().contiguous()
        (handle,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to)])
        leaving.append((handle, tensor))

    def receive(tensor, source):
        for handle in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, source)]):
            handle.wait()

    for what, i in schedule:
        if what == "forward":
            if rank == 0:
                x = micro_batches[i]
            else:
                x = buffer(i)
                receive(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) * len(targets[i]) / samples
                total += y.detach()
            else:
                send(y, rank + 1)
            kept[i] = x, y
        else:
            x, y = kept[i]
            kept[i] = None
            if rank == last:
                y.backward()
            else:
                gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
                receive(gradient, rank + 1)
                y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
    for handle, _ in leaving:
        handle.wait()
    dist.broadcast(total, last)
    return total
