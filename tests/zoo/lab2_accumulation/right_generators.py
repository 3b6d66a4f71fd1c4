"""Groups come from a generator, and a second one says which micro-batch is the last; a class keeps
the state. The convergence runs deal samples out in strides.

loses: nothing
"""


# %% replaces="task2_train_epoch"
def in_groups(batches, size):
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


class Stepper:
    def __init__(self, model, optimizer, max_norm, scheduler):
        self.model, self.optimizer = model, optimizer
        self.max_norm, self.scheduler = max_norm, scheduler
        self.count = 0

    def __call__(self):
        if self.max_norm is not None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
            if norm > self.max_norm:
                for grad in grads:
                    grad *= self.max_norm / norm
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.count += 1


def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    stepper = Stepper(model, optimizer, max_norm, scheduler)
    for group in in_groups(batches, accumulation_steps):
        optimizer.zero_grad()
        for x, y in group:
            torch.autograd.backward(loss_fn(model(x), y) / len(group))
        stepper()
    optimizer.zero_grad()
    return stepper.count


# %% replaces="task3_accumulate_ddp"
def with_contexts(ddp_model, micro_batches):
    *first, last = micro_batches
    for batch in first:
        with ddp_model.no_sync():
            yield batch
    yield last


def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    mean = torch.zeros(1, device=micro_batches[0][1].device)
    for x, y in with_contexts(ddp_model, micro_batches):
        loss = loss_fn(ddp_model(x), y) / len(micro_batches)
        loss.backward()
        mean += loss.data
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


# %% replaces="task7_convergence"
def compare_convergence(
    make_model,
    train_step,
    x,
    y,
    *,
    global_batch_size,
    num_steps,
    accumulation_steps,
    rank,
    world_size,
):
    def run(k):
        model = make_model()
        for xs, ys in zip(
            x.split(global_batch_size)[:num_steps],
            y.split(global_batch_size)[:num_steps],
            strict=True,
        ):
            mine, wanted = xs[rank::world_size], ys[rank::world_size]
            yield train_step(model, [(mine[i::k], wanted[i::k]) for i in range(k)])

    return {k: list(run(k)) for k in accumulation_steps}
