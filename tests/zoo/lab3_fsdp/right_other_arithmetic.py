"""Other words for the same numbers in the small tasks; ranks meet in a barrier before they measure.

loses: nothing
"""


# %% replaces="task1_formula"
def bytes_per_rank(num_params, world_size, strategy, mixed=False):
    if strategy not in {"ddp", "zero1", "zero2", "zero3"}:
        raise ValueError(strategy)
    part, rest = divmod(num_params, world_size)
    part += rest > 0
    p = part if strategy == "zero3" else num_params
    g = part if strategy in ("zero2", "zero3") else num_params
    o = num_params if strategy == "ddp" else part
    return (2 * p, 2 * g, 12 * o) if mixed else (4 * p, 4 * g, 8 * o)


# %% replaces="task2_measure"
def local_bytes(params, optimizer):
    seen, weights, grads = set(), 0, 0
    for p in params:
        if id(p) in seen:
            continue
        seen.add(id(p))
        weights += getattr(p, "_local_tensor", p).nbytes
        if p.grad is not None:
            grads += getattr(p.grad, "_local_tensor", p.grad).nbytes
    state = 0
    for values in optimizer.state.values():
        for v in values.values():
            if torch.is_tensor(v):
                state += getattr(v, "_local_tensor", v).nbytes
    return weights, grads, state


# %% replaces="task4_fully_shard"
def policies(device_type, mixed, offload):
    out = {}
    if mixed:
        out["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if offload:
        out["offload_policy"] = CPUOffloadPolicy(pin_memory=(device_type == "cuda"))
    return out


def shard_model(model, units, mesh, **options):
    for unit in reversed(units):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


# %% replaces="task7_throughput"
def throughput(
    step, num_samples, synchronize, device, *, warmup=2, repeats=5, clock=time.perf_counter
):
    for i in range(warmup + repeats):
        if i == warmup:
            dist.barrier()
            synchronize()
            start = clock()
        step()
    synchronize()
    took = clock() - start
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (num_samples, took))
    return repeats * sum(n for n, _ in told) / max(t for _, t in told)


def scaling_efficiency(alone, together, world_size):
    return together / alone / world_size


# %% replaces="task8_choice"
def traffic_per_rank(num_params, world_size, strategy, bytes_per_number=4):
    once = num_params * bytes_per_number * (1 - 1 / world_size)
    return {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}[strategy] * once


def choose_strategy(num_params, world_size, budget_bytes, mixed=False):
    for name in ("ddp", "zero1", "zero2", "zero3"):
        if sum(bytes_per_rank(num_params, world_size, name, mixed=mixed)) <= budget_bytes:
            return name
    return "offload"
