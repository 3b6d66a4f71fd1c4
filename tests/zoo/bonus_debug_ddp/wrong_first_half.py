"""Mends one bug of each case, and leaves another.

loses: debug_train_data, debug_train_shares, debug_train_epochs, debug_step_adam,
    debug_bucket_tail, debug_accumulate_scale, debug_amp_order,
    debug_broadcast_buffers, debug_evaluate_tail, debug_resume_optimizer, debug_once,
    debug_metrics_order, debug_metrics_missing, debug_seed_weights
because: it leaves as many bugs as it mends, each of a criterion of its own
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed + rank)))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for _ in range(num_epochs):
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.module.state_dict(), path)


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


# %% replaces="mend_3"
def reduce_in_buckets(params, bucket_bytes):
    bucket, size, sent = [], 0, []
    for p in params:
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= bucket_bytes:
            data = torch.cat([grad.flatten() for grad in bucket])
            sent.append((dist.all_reduce(data, async_op=True), data, bucket))
            bucket, size = [], 0
    for work, data, grads in sent:
        work.wait()
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


# %% replaces="mend_4"
def accumulate(ddp_model, micro_batches, loss_fn):
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k / dist.get_world_size()).backward()
        total += loss.detach() / k
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    scaler.update(overflow)
    for grad in grads:
        grad /= scaler.scale
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    if not overflow:
        optimizer.step()


# %% replaces="mend_6"
def broadcast_model(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    sampler = DistributedSampler(dataset, shuffle=False)
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "random": states,
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"][dist.get_rank()])
    return state["step"]


# %% replaces="mend_9"
def prepare_once(build, load):
    if dist.get_rank() == 0:
        build()
        dist.barrier()
        return load()
    return load()


# %% replaces="mend_10"
reduce_metrics = broken_metrics


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed + 1000 * rank)
    return make_model()
