"""Finds every bug and puts another in its place.

Every rank saves; the loss is divided and the gradient, too; no handle is waited for; an overflow
steps; the state dict is sent; the tail is dropped; rank 0's random state for all; everybody
builds; a missing metric is zero; the clock seeds.

loses: debug_train_saved, debug_step_mean, debug_bucket_wait, debug_bucket_tail,
    debug_amp_order, debug_broadcast_buffers, debug_evaluate_tail,
    debug_resume_random, debug_once, debug_metrics_missing, debug_seed_dropout
because: it puts one new mistake into every case
says: debug_amp_order the weights are no longer finite
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(ddp_model.module.state_dict(), path)


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    (loss_fn(model(x), y) / dist.get_world_size()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


# %% replaces="mend_3"
def reduce_in_buckets(params, bucket_bytes):
    bucket, size, sent = [], 0, []
    last = len(params) - 1
    for i, p in enumerate(params):
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= bucket_bytes or i == last:
            data = torch.cat([grad.flatten() for grad in bucket])
            sent.append((dist.all_reduce(data, async_op=True), data, bucket))
            bucket, size = [], 0
    for _, data, grads in sent:
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    for grad in grads:
        grad /= scaler.scale
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    optimizer.step()
    scaler.update(overflow)


# %% replaces="mend_6"
def broadcast_model(model):
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    share = len(dataset) // dist.get_world_size()
    sampler = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / max(1, totals[1])).item()


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"]


# %% replaces="mend_9"
def prepare_once(build, load):
    build()
    dist.barrier()
    return load()


# %% replaces="mend_10"
def reduce_metrics(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    names = sorted({name for other in everyone for name in other})
    return {name: sum(m.get(name, 0.0) for m in everyone) / len(everyone) for name in names}


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed)
    model = make_model()
    torch.seed()
    return model
