"""No DDP machinery: adds up unscaled gradients of the bare module, all-reduces one flat tensor, and
divides at the end. In tasks 1 and 2 too the gradients are divided, not the losses.

loses: nothing
class: example
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    samples = loss_sum = 0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) * len(x)
        loss.backward()
        samples += len(x)
        loss_sum += float(loss)
    for p in model.parameters():
        if p.requires_grad:
            p.grad.div_(samples)
    return loss_sum / samples


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    def step(size):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(size)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        model.zero_grad()

    model.zero_grad()
    waiting = steps = 0
    for x, y in batches:
        loss_fn(model(x), y).backward()
        waiting += 1
        if waiting == accumulation_steps:
            step(waiting)
            waiting, steps = 0, steps + 1
    if waiting:
        step(waiting)
        steps += 1
    return steps


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    module = ddp_model.module
    loss_sum = 0.0
    for x, y in micro_batches:
        loss = loss_fn(module(x), y)
        loss.backward()
        loss_sum = loss_sum + loss.detach()
    params = list(module.parameters())
    flat = torch.cat([p.grad.flatten() for p in params] + [loss_sum.reshape(1)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size() * len(micro_batches)
    place = 0
    for p in params:
        p.grad = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    return flat[-1].item()


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    module = ddp_model.module
    sums = torch.zeros(2, dtype=torch.float64, device=micro_batches[0][0].device)
    for tokens, targets in micro_batches:
        count = (targets != IGNORED).sum()
        loss = loss_fn(module(tokens), targets) * count
        loss.backward()
        sums += torch.stack([loss.detach().double(), count.double()])
    dist.all_reduce(sums)
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= sums[1]
    return (sums[0] / sums[1]).item()
