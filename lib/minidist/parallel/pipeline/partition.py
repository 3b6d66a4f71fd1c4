"""Cut a model into pipeline stages of equal cost; keep tied embeddings equal on both ends.

Phases of `split_model`: list the model's units (the parts that cannot be cut further), compute
their costs, find the best contiguous partition, build one module per stage.

>>> balance([4, 1, 1, 1, 1, 4], 3)
[range(0, 1), range(1, 5), range(5, 6)]
>>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
>>> [list(stage.state_dict()) for stage in split_model(model, 2)]
[['0.weight', '0.bias'], ['2.weight', '2.bias', '3.weight', '3.bias']]

Stages share the model's modules, and parameters keep their names, so the union of the stages' state
dicts is the model's state dict. Rank r of p then keeps `stages[r]`, or `stages[r::p]` with several
chunks per rank.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Contiguous parts whose largest sum is as small as possible; none is empty.

    Dynamic programming over (units taken, stages used): O(n^2 * num_stages) for n units.

    Args:
        costs: the cost of each unit, all in the same measure (parameters, seconds); not negative.

    Returns:
        Per stage, the indices of its units.

    Raises:
        ValueError: fewer units than stages, or a negative cost.
    """
    n = len(costs)
    if not 1 <= num_stages <= n:
        raise ValueError(f"balance: cannot cut {n} units into {num_stages} stages of one or more")
    if min(costs) < 0:
        raise ValueError(f"balance: costs cannot be negative, got {min(costs)}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i] = (largest sum, begin of the last stage) for the first i units; updated per stage.
    best = [(sums[i], 0) for i in range(n + 1)]
    begins = [[0] * (n + 1)]
    for stage in range(1, num_stages):
        best = [(float("inf"), 0)] * (stage + 1) + [
            min((max(best[j][0], sums[i] - sums[j]), j) for j in range(stage, i))
            for i in range(stage + 1, n + 1)
        ]
        begins.append([begin for _, begin in best])
    parts: list[range] = []
    end = n
    for stage in reversed(range(num_stages)):
        begin = begins[stage][end]
        parts.append(range(begin, end))
        end = begin
    return parts[::-1]


def split_model(
    model: nn.Module, num_stages: int, costs: Sequence[float] | None = None
) -> list[nn.Module]:
    """Stages of a `minidist.model.GPT`, a `minidist.model.ResNet` or an `nn.Sequential`.

    The units of a GPT are the embeddings, every block, and the norm with the head; those of a
    ResNet are the stem, its stages and the head; those of a Sequential are its modules.

    Args:
        costs: one number per unit, e.g. seconds; by default the number of parameters.

    Raises:
        ValueError: a different kind of model, more stages than units, or a wrong number of costs.
    """
    if isinstance(model, nn.Sequential):
        units = list(model)
        build: Callable[[range], nn.Module] = lambda part: model[part.start : part.stop]  # noqa: E731
    elif all(hasattr(model, name) for name in ("token_embedding", "blocks", "norm", "head")):
        gpt = cast(Any, model)
        first = nn.ModuleList([gpt.token_embedding, gpt.position_embedding])
        units = [first, *gpt.blocks, nn.ModuleList([gpt.norm, gpt.head])]
        build = lambda part: GPTStage(model, part, len(units))  # noqa: E731
    elif all(hasattr(model, name) for name in ("stem", "stages", "head")):
        units = [model.stem, *cast(Any, model).stages, model.head]
        build = lambda part: _resnet_stage(model, part, len(units))  # noqa: E731
    else:
        raise ValueError(
            "split_model: expected an nn.Sequential, a GPT (token_embedding, blocks, norm, head) "
            f"or a ResNet (stem, stages, head), got {type(model).__name__}"
        )
    if costs is None:
        costs = [sum(p.numel() for p in cast(nn.Module, unit).parameters()) for unit in units]
    if len(costs) != len(units):
        raise ValueError(f"split_model: {len(units)} units need as many costs, got {len(costs)}")
    return [build(part) for part in balance(costs, num_stages)]


class GPTStage(nn.Module):
    """Some consecutive units of a GPT: embeddings, blocks, norm and head.

    The first stage takes tokens_BT, the others take x_BTD; the last stage returns logits_BTV. If
    the model is tied and cut, the last stage gets a copy of the weight for its head, and
    `sync_tied_gradients` keeps the copy equal to the embedding's weight.

    Args:
        model: the GPT; its modules are shared, except a tied head.
        part: the units of this stage; unit 0 is the embeddings, unit num_units - 1 is norm and
            head.
    """

    def __init__(self, model: nn.Module, part: range, num_units: int) -> None:
        super().__init__()
        gpt = cast(Any, model)
        self.config = gpt.config
        self._embed = type(gpt).embed  # the model's own code, on the modules of this stage
        self.is_first, self.is_last = part.start == 0, part.stop == num_units
        self.tied_weight_name: str | None = None
        tied = gpt.head.weight is gpt.token_embedding.weight and not (
            self.is_first and self.is_last
        )
        if self.is_first:
            self.token_embedding = gpt.token_embedding
            self.position_embedding = gpt.position_embedding
            self.tied_weight_name = "token_embedding.weight" if tied else None
        # A dict with the model's indices as keys, so that names in the state dict do not change.
        blocks = range(max(part.start - 1, 0), min(part.stop - 1, num_units - 2))
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        if self.is_last:
            self.norm = gpt.norm
            self.head = copy.deepcopy(gpt.head) if tied else gpt.head
            self.tied_weight_name = "head.weight" if tied else self.tied_weight_name

    def forward(self, x: Tensor) -> Tensor:
        """tokens_BT or x_BTD -> x_BTD or logits_BTV."""
        if self.is_first:
            x = self._embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def _resnet_stage(model: nn.Module, part: range, num_units: int) -> nn.Module:
    stages = cast(nn.Sequential, model.stages)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if part.start == 0:
        parts["stem"] = cast(nn.Module, model.stem)
    inner = cast(nn.Sequential, stages[max(part.start - 1, 0) : min(part.stop - 1, num_units - 2)])
    if len(inner):
        parts["stages"] = inner
    if part.stop == num_units:
        parts["head"] = cast(nn.Module, model.head)
    return nn.Sequential(parts)


def sync_tied_gradients(
    stages: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Give both copies of a tied weight the sum of their gradients. Middle ranks do nothing.

    The model uses the weight twice, so its gradient has two parts, one at each end of the pipeline.
    With equal gradients and equal optimizer state the copies stay equal (Megatron-LM does the
    same).

    Args:
        stages: this rank's stages, after the backward pass.
        group: the pipeline's ranks.
    """
    weights: list[Tensor] = [
        stage.get_parameter(stage.tied_weight_name)
        for stage in stages
        if isinstance(stage, GPTStage) and stage.tied_weight_name is not None
    ]
    if not weights or not weights[0].requires_grad:
        return
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if len(grads) == 2:  # both ends are on this rank
        total = grads[0] + grads[1]
        grads[0].copy_(total)
        grads[1].copy_(total)
        return
    # An all-reduce of two ranks, done as an exchange, because this needs no group of the two ranks.
    last = dist.get_world_size(group) - 1
    other = last if dist.get_rank(group) == 0 else 0
    wire = "cpu" if dist.get_backend(group) == "gloo" else grads[0].device
    mine = grads[0].to(wire).contiguous()
    theirs = torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=other),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    # Both ranks get the same bits, because a + b = b + a.
    grads[0].add_(theirs.to(grads[0].device))
