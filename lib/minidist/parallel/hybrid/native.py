"""Two axes with torch alone: tensor parallelism by DTensor, then FSDP2 on the result.

The order matters: tensor parallelism comes first and makes parameters DTensors over the axis "tp".
Then `fully_shard` shards these DTensors along "dp" as well. Both use an axis of the same
DeviceMesh. For a pipeline around such stages, torch has `torch.distributed.pipelining` (see
`pipeline.native`).

Example, on 4 ranks::

    mesh = make_mesh(dp=2, tp=2)
    model = parallelize_native(GPT(config), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with loss_parallel():
        loss = lm_loss(model(tokens_BT), targets_BT)      # the batch of this dp rank
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # a DTensor: norm over all ranks
    optimizer.step()

Paper: torchtitan (arXiv 2410.06511).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard

from minidist.mesh import Mesh
from minidist.parallel.tensor.native import loss_parallel, parallelize_gpt_native

__all__ = ["loss_parallel", "parallelize_native"]


def parallelize_native(model: Any, mesh: Mesh, *, sequence_parallel: bool = False) -> Any:
    """Split a `minidist.model.GPT` in place over the axes tp and dp of a mesh.

    Raises:
        ValueError: the mesh has a pp or cp axis above 1, or heads or vocabulary do not divide.
    """
    if mesh.size("pp") > 1 or mesh.size("cp") > 1:
        raise ValueError(f"parallelize_native: takes the axes dp and tp, got {mesh.shape}")
    parallelize_gpt_native(model, mesh, sequence_parallel=sequence_parallel)
    for block in model.blocks:
        fully_shard(block, mesh=mesh.device_mesh["dp"])
    return fully_shard(model, mesh=mesh.device_mesh["dp"])
