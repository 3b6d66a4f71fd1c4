"""The same run in other frameworks: launch recipes for DeepSpeed and Megatron.

One `TrainConfig` says what to train; a recipe says it again in the words of another framework, or
raises a ValueError that names what that framework has no word for.

| module | what is in it | where it has run |
|---|---|---|
| `deepspeed` | configuration; training with ZeRO-0 to -3 or a pipeline | CPU, 2 ranks, gloo |
| `megatron` | arguments of Megatron-LM's script; a rank's part of the model | built on a CPU |

Optional: `pip install --no-build-isolation "minidist[peers]"` installs both. Their configurations
are made, and tested, without them. tests/parallel/test_peers.py compares DeepSpeed's loss curve
with that of `minidist.train` where it is installed. **BLOCKED**: Megatron-Core's forward pass
allocates on a CUDA device, so without one it is built and its parameters are counted, and it is not
trained.
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
