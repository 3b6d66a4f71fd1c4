"""The same run in other frameworks: launch recipes for DeepSpeed and Megatron.

One `TrainConfig` describes a run. A recipe translates it into the settings of a different
framework, or raises a ValueError that names the setting that the recipe cannot translate.

| module | what is in it | where it has run |
|---|---|---|
| `deepspeed` | configuration; training with ZeRO-0 to -3 or a pipeline | CPU, 2 ranks, gloo |
| `megatron` | arguments of Megatron-LM's script; a rank's part of the model | built on a CPU |

Both frameworks are optional: `pip install --no-build-isolation "minidist[peers]"` installs them.
The translation of configurations works, and is tested, without them. If DeepSpeed is installed,
tests/parallel/test_peers.py compares its loss curve with that of `minidist.train`. **BLOCKED**:
Megatron-Core's forward pass allocates on a CUDA device. Without a CUDA device the tests build the
model and count its parameters, but do not train it.
"""

from minidist.peers.deepspeed import deepspeed_config, train_deepspeed
from minidist.peers.megatron import build_megatron, megatron_arguments, megatron_settings

__all__ = [
    "build_megatron",
    "deepspeed_config",
    "megatron_arguments",
    "megatron_settings",
    "train_deepspeed",
]
