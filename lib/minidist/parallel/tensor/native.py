"""The same GPT, split by torch: DTensor and `parallelize_module`.

Each entry of the plan says how a module's parameters are split, and which layouts its input and
output have; torch inserts the collectives. Common mistakes:

- `Attention.forward` unflattens by `num_heads`, but sees a local tensor with H / n heads, so the
  program must change `num_heads`.
- Query, key and value are three column-parallel layers with one input. With only one plan entry for
  each, the gradient of this input is reduced three times. `PrepareModuleInput` on the attention
  makes the input one replicated DTensor; then the three partial gradients are added first and
  reduced once.
- `loss_parallel` needs logits that are still a DTensor (`use_local_output=False`), and the backward
  pass must run inside it.
- Norms and position embedding are not split. If the plan does not contain them, their parameters
  stay plain tensors. `clip_grad_norm_` and optimizers with `foreach` (the default on GPUs) raise on
  a mix of plain tensors and DTensors. `distribute_module` makes them replicated DTensors.
- With sequence parallelism each rank has a part of a norm's gradient, and the DTensor is Partial.
  torch 2.11's `clip_grad_norm_` scales such a gradient wrongly. A hook adds the parts up first.

Example, on each rank of a group of 2::

    model = parallelize_gpt_native(GPT(config), mesh, sequence_parallel=True)
    with loss_parallel():
        loss = lm_loss(model(tokens_BT), targets_BT)
        loss.backward()

Papers: Megatron-LM (arXiv 1909.08053), GSPMD (arXiv 2105.04663), PyTorch's own: torchtitan
(arXiv 2410.06511).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from minidist.mesh import Mesh
from minidist.parallel.tensor.config import split_evenly
from minidist.replaced import embedding_options, refuse_options

__all__ = ["loss_parallel", "parallelize_gpt_native"]


def parallelize_gpt_native(
    model: Any, mesh: Mesh | DeviceMesh, *, sequence_parallel: bool = False, one_input: bool = True
) -> Any:
    """Split a `minidist.model.GPT` in place; its forward returns logits sharded by vocabulary.

    Args:
        mesh: a `Mesh` (its axis "tp") or a one-dimensional `DeviceMesh`.
        one_input: make the input of query, key and value one DTensor. False is for comparison;
            `sequence_parallel` ignores it.

    Raises:
        ValueError: heads, vocabulary, or (with sequence parallelism) positions do not divide; or an
            embedding has options that DTensor would apply wrongly.
    """
    # Validate.
    tp = mesh.device_mesh["tp"] if isinstance(mesh, Mesh) else mesh
    config = model.config
    for what, total in [("heads", config.num_heads), ("vocabulary", config.vocab_size)]:
        split_evenly(f"parallelize_gpt_native: {what}", total, tp.size())
    if sequence_parallel:
        split_evenly("parallelize_gpt_native: positions", config.context, tp.size())

    embeddings = [model.token_embedding]
    embeddings += [model.position_embedding] if sequence_parallel else []
    for embedding in embeddings:
        why = "DTensor looks rows up by their number on the rank"
        refuse_options("parallelize_gpt_native", embedding, embedding_options(embedding), why)

    # Derive the plan. Between the split layers activations are replicated, or split by tokens.
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    block_plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(input_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if one_input or sequence_parallel:
        block_plan["attention"] = PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate()
        )
    if sequence_parallel:
        plan["position_embedding"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0)
        )
        plan["norm"] = SequenceParallel()
        block_plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}

    # Build.
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, block_plan)
        block.attention.num_heads //= tp.size()
    if not sequence_parallel:
        norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)]
        for module in (model.position_embedding, model.norm, *norms):
            _replicate(module, tp)
    if config.tied:
        model.head.weight = model.token_embedding.weight  # both are Shard(0)
    if sequence_parallel:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_add_parts)
    return model


def _add_parts(parameter: Any) -> None:
    """A gradient of which each rank has a part becomes the sum of the parts on every rank."""
    grad = parameter.grad
    if any(placement.is_partial() for placement in grad.placements):
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make parameters replicated DTensors; input and output stay plain and equal on all ranks."""

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, input_fn=enter, output_fn=leave)
