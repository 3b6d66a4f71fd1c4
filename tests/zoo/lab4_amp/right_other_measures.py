"""Keeps the saved tensors and looks at them later; sorts the times; gathers all facts.

loses: nothing
"""


# %% replaces="task4_memory"
def memory_report(model, optimizer, compute_loss):
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = compute_loss()
    loss.backward()
    optimizer.step()

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in kept}
    for p in model.parameters():
        storages.pop(p.untyped_storage().data_ptr(), None)
    moments = [
        value
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "saved": sum(storages.values()),
        "parameters": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": size(moments),
        "all": 0,
    }


# %% replaces="task5_speed"
def time_step(step, synchronize, device, *, warmup=3, repeats=11, clock=time.perf_counter):
    for _ in range(warmup):
        step()
        synchronize()
    last, times = clock(), []
    for _ in range(repeats):
        step()
        synchronize()
        now = clock()
        times.append(now - last)
        last = now
    times.sort()
    mine = (times[repeats // 2] + times[(repeats - 1) // 2]) / 2
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return max(everybody)


# %% replaces="task6_choice"
def choose_precision(has_bf16, has_fp16, largest, device):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (has_bf16, has_fp16, largest))
    bf16, fp16, seen = zip(*everybody)
    if all(bf16):
        return torch.bfloat16, False
    return (torch.half, True) if all(fp16) and max(seen) <= 32752 else (None, False)
