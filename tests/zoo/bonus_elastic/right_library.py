"""As in minidist: shares by rounding, a note in an Event with a timer, parts that overlap.

loses: nothing
"""


# %% replaces="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


# %% replaces="task4_reshard"
def reshard(states, numel, num_ranks):
    """Each new rank looks for the old parts that overlap with its own."""
    length = -(-numel // num_ranks)
    fresh = []
    for rank in range(num_ranks):
        begin, end = rank * length, min((rank + 1) * length, numel)
        state = {}
        for name, value in states[0].items():
            if not isinstance(value, torch.Tensor) or value.dim() != 1:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            state[name] = torch.zeros(length, dtype=value.dtype, device=value.device)
            for old, source in enumerate(states):
                first = old * len(value)
                low, high = max(begin, first), min(end, first + len(value))
                if low < high:
                    state[name][low - begin : high - begin] = source[name][
                        low - first : high - first
                    ]
        fresh.append(state)
    return fresh


# %% replaces="task5_preemption"
import threading


class Preemption:
    def __init__(self, grace_s=60.0):
        self.grace_s, self.seen, self.timer = grace_s, threading.Event(), None

    def __enter__(self):
        self.before = {}
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self.before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.in_time()

    def handle(self, number, frame):
        if not self.seen.is_set():
            self.seen.set()
            self.timer = threading.Timer(self.grace_s, os._exit, [128 + number])
            self.timer.daemon = True
            self.timer.start()

    def in_time(self):
        if self.timer is not None:
            self.timer.cancel()

    def requested(self):
        self.in_time()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen.is_set())
        return any(everyone)
