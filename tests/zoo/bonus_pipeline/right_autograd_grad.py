"""Asks autograd for gradients by name, weighs them instead of the loss, and adds them itself.

loses: nothing
class: example
"""


# %% replaces="task4_pipeline"
def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    rank, n = dist.get_rank(), dist.get_world_size()
    params = [p for p in stage.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    kept, handles, losses = {}, [], {}
    for what, i in schedule:
        if what == "forward":
            if rank == 0:
                x = micro_batches[i]
            else:
                x = buffer(i)
                dist.irecv(x, src=rank - 1).wait()
                x = x.requires_grad_()
            out = stage(x)
            if rank == n - 1:
                out = loss_fn(out, targets[i])
                losses[i] = out.item()
            else:
                sent = out.detach().clone(memory_format=torch.contiguous_format)
                handles.append(dist.isend(sent, dst=rank + 1))
            kept[i] = (x, out)
            del x, out
        else:
            x, out = kept.pop(i)
            if rank == n - 1:
                share = len(targets[i]) / sum(len(t) for t in targets)
                outer = torch.full_like(out, share)
            else:
                outer = torch.empty(out.shape, dtype=out.dtype, device=out.device)
                dist.irecv(outer, src=rank + 1).wait()
            wanted = params + ([x] if rank else [])
            found = torch.autograd.grad(out, wanted, outer)
            for into, grad in zip(sums, found, strict=False):
                into += grad
            if rank:
                handles.append(dist.isend(found[-1].contiguous(), dst=rank - 1))
            del x, out, found
    for p, grad in zip(params, sums, strict=True):
        p.grad = grad if p.grad is None else p.grad + grad
    for handle in handles:
        handle.wait()
    told = [None]
    if rank == n - 1:
        count = sum(len(t) for t in targets)
        told = [sum(losses[i] * len(targets[i]) for i in losses) / count]
    dist.broadcast_object_list(told, src=n - 1)
    return torch.tensor(told[0], dtype=torch.float64)
