"""Right, with warnings on stderr from everywhere, logging included.

base: reference
"""

# %% put="after imports"
import logging
import warnings

warnings.simplefilter("always")
torch.set_warn_always(True)
logging.basicConfig(level=logging.DEBUG)
logging.getLogger().setLevel(logging.INFO)
print("to stderr", file=sys.stderr)
_real_all_reduce = dist.all_reduce


def _warn(*arguments, **options):
    warnings.warn("an all-reduce", stacklevel=2)
    logging.error("an all-reduce")
    os.write(2, b"past Python\n")
    return _real_all_reduce(*arguments, **options)


dist.all_reduce = _warn
