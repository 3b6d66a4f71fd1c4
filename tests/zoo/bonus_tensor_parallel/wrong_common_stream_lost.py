"""Does not put the common generator back: masks outside differ from here on.

loses: btp_masks_outside
class: example
"""


# %% replaces="task5_stream"
class RankStream:
    def __init__(self, seed):
        own = seed * 1000 + dist.get_rank() + 1
        self.state = torch.Generator(DEVICE).manual_seed(own).get_state()

    @contextlib.contextmanager
    def fork(self):
        random = torch.cuda if DEVICE.type == "cuda" else torch
        random.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = random.get_rng_state()
