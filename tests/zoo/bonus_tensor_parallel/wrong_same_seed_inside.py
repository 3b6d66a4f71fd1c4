"""The stream does not depend on the rank.

loses: btp_masks_inside
"""


# %% replaces="task5_stream"
class RankStream:
    def __init__(self, seed):
        own = seed * 1000
        self.state = torch.Generator(DEVICE).manual_seed(own).get_state()

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
