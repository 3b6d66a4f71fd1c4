"""Seeds torch itself with a number of the rank.

loses: btp_masks_outside
"""


# %% replaces="task5_stream"
class RankStream:
    def __init__(self, seed):
        own = seed * 1000 + dist.get_rank() + 1
        torch.manual_seed(own)
        self.state = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self):
        random = torch.cuda if DEVICE.type == "cuda" else torch
        common = random.get_rng_state()
        random.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = random.get_rng_state()
            random.set_rng_state(common)
