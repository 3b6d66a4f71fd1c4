"""Leaves those bugs that the first half has mended.

loses: debug_train_zero_grad, debug_train_saved, debug_step_mean, debug_bucket_wait,
    debug_accumulate_loss, debug_amp_clip, debug_broadcast_frozen,
    debug_evaluate_batches, debug_resume_random, debug_seed_dropout
because: it leaves as many bugs as it mends, each of a criterion of its own
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.state_dict(), path)


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
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
            work = dist.all_reduce(data, async_op=True)
            sent.append((data, bucket))
            bucket, size = [], 0
    work.wait()
    for data, grads in sent:
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


# %% replaces="mend_4"
def accumulate(ddp_model, micro_batches, loss_fn):
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k).backward()
        total += loss.detach() / k
    return total.item()


# %% replaces="mend_5"
def amp_step(ddp_model, optimizer, scaler, loss, *, max_norm):
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    for grad in grads:
        grad /= scaler.scale
    if not overflow:
        optimizer.step()
    scaler.update(overflow)


# %% replaces="mend_6"
def broadcast_model(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE))
            totals[1] += 1
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


# %% replaces="mend_8"
def save_checkpoint(folder, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    state = torch.load(folder / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed)
    return make_model()
