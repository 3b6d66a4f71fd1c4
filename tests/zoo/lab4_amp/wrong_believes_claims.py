"""Believes what lectures say.

fp16 loses what is below 6e-5, mixed precision halves everything, bf16 needs a scaler as well, and a
clock around the calls times a device.

loses: amp_lost_share, amp_memory, amp_timing, amp_choice
class: example
because: there are four faults in it, one for each.
says: amp_lost_share Subnormal numbers are not lost
says: amp_memory numel × element_size of every parameter
says: amp_timing That is how long it takes to queue a step
says: amp_choice expected (dtype, needs a scaler) = (bfloat16, False)
"""


# %% replaces="task1_formats"
def lost_share(values, dtype, scale=1.0):
    alive = values[values != 0].abs() * scale
    if len(alive) == 0:
        return 0.0
    return (alive < torch.finfo(dtype).smallest_normal).double().mean().item()


def safe_scale(gradients, dtype):
    top = torch.stack([g.abs().max() for g in gradients]).max()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / top.item()))


# %% replaces="task4_memory"
def memory_report(model, optimizer, compute_loss):
    width = 2 if torch.is_autocast_enabled("cpu") else 4
    numel = sum(p.numel() for p in model.parameters())
    optimizer.zero_grad()
    loss = compute_loss()
    loss.backward()
    optimizer.step()
    parameters = numel * width // 2
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "saved": parameters,
    }


# %% replaces="task5_speed"
def time_step(step, synchronize, device, *, warmup=3, repeats=11, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        begin = clock()
        step()
        times.append(clock() - begin)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


# %% replaces="task6_choice"
def choose_precision(has_bf16, has_fp16, largest, device):
    facts = torch.tensor([not has_bf16, not has_fp16, largest], dtype=torch.float64, device=device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    no_bf16, no_fp16, largest = facts.tolist()
    if not no_bf16:
        return torch.bfloat16, True
    if not no_fp16 and largest <= 65504 / 2:
        return torch.float16, True
    return None, False
