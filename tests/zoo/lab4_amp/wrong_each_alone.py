"""Every rank decides and measures for itself.

loses: amp_safe_scale, amp_timing, amp_choice
because: three functions have this fault.
says: amp_timing all wait for the slowest rank
says: amp_choice All ranks have to choose alike
"""


# %% replaces="task1_formats"
def lost_share(values, dtype, scale=1.0):
    alive = values[values != 0]
    return float(((alive * scale).to(dtype) == 0).double().mean()) if len(alive) else 0.0


def safe_scale(gradients, dtype):
    top = max(g.abs().max().item() for g in gradients)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / top))


# %% replaces="task5_speed"
def time_step(step, synchronize, device, *, warmup=3, repeats=11, clock=time.perf_counter):
    times = []
    for number in range(warmup + repeats):
        synchronize()
        begin = clock()
        step()
        synchronize()
        if number >= warmup:
            times.append(clock() - begin)
    return statistics.median(times)


# %% replaces="task6_choice"
def choose_precision(has_bf16, has_fp16, largest, device):
    if has_bf16:
        return torch.bfloat16, False
    if has_fp16 and largest <= 65504 / 2:
        return torch.float16, True
    return None, False
