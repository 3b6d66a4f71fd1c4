"""Loads ahead with an executor; buckets as views of one flat tensor, divided before they travel;
finds the best cap on a geometric grid and then near it.

loses: nothing
"""


# %% replaces="task4_wait"
def loader_wait(loader, step, synchronize, clock=time.perf_counter):
    times, source = [clock()], iter(loader)
    while (batch := next(source, times)) is not times:
        times.append(clock())
        step(batch)
        synchronize()
        times.append(clock())
    times = times[: len(times) // 2 * 2 + 1]
    waits = [b - a for a, b in zip(times[0::2], times[1::2])][1:]
    works = [b - a for a, b in zip(times[1::2], times[2::2])][1:]
    return sum(waits) / len(waits), sum(works) / len(works)


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    from collections import deque
    from concurrent.futures import ThreadPoolExecutor

    source, end = iter(batches), object()
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        pending = deque(pool.submit(next, source, end) for _ in range(depth))
        while True:
            pending.append(pool.submit(next, source, end))
            batch = pending.popleft().result()
            if batch is end:
                return
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# %% replaces="task5_tune"
def tune_plan(sizes, measure):
    tried = {}

    def cost(cap):
        plan = plan_buckets(sizes, cap)
        key = tuple(map(len, plan))
        if key not in tried:
            tried[key] = (measure(plan), plan)
        return tried[key][0]

    low, high = min(sizes) * 0.99, sum(sizes)
    grid = [low * (high / low) ** (i / 25) for i in range(26)]
    best = min(grid, key=cost)
    for factor in (0.85, 0.9, 0.95, 1.05, 1.1, 1.15):
        cost(best * factor)
    return min(tried.values(), key=lambda pair: pair[0])[1]


# %% replaces="task5_buckets"
class GradientBuckets:
    def __init__(self, module, plan):
        self.params = params = list(module.parameters())
        self.where = {i: b for b, bucket in enumerate(plan) for i in bucket}
        self.flats = [torch.cat([torch.zeros_like(params[i]).flatten() for i in b]) for b in plan]
        self.views = {}
        for flat, bucket in zip(self.flats, plan):
            for i, piece in zip(bucket, flat.split([params[i].numel() for i in bucket])):
                self.views[i] = piece.view_as(params[i])
        self.sizes = [len(b) for b in plan]
        self.reset()
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self.arrived(i, p))

    def reset(self):
        self.count = [0] * len(self.sizes)
        self.futures = []

    def arrived(self, i, p):
        self.views[i].copy_(p.grad / dist.get_world_size())
        self.count[self.where[i]] += 1
        while len(self.futures) < len(self.sizes):
            b = len(self.futures)
            if self.count[b] < self.sizes[b]:
                break
            self.futures.append(dist.all_reduce(self.flats[b], async_op=True).get_future())

    def finish(self):
        for future in self.futures:
            future.wait()
        for i, p in enumerate(self.params):
            p.grad = self.views[i].clone()
        self.reset()
