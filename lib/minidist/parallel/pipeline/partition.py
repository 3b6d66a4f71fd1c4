"""Cut a model into pipeline stages of equal cost.

Phases of `split_model`: list the model's units (the parts that cannot be cut further), compute
their costs, find the best contiguous partition, build one module per stage.

>>> balance([4, 1, 1, 1, 1, 4], 3)
[range(0, 1), range(1, 5), range(5, 6)]
>>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
>>> [list(stage.state_dict()) for stage in split_model(model, 2)]
[['0.weight', '0.bias'], ['2.weight', '2.bias', '3.weight', '3.bias']]

Stages share the model's modules, and parameters keep their names, so the union of the stages' state
dicts is the model's state dict. Rank r of p then keeps `stages[r]`, or `stages[r::p]` with several
chunks per rank. A weight that the model uses on both sides of a cut gets copies (`ties.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.packing import PACKED
from minidist.parallel.pipeline.ties import tie_weights
from minidist.replaced import check_parts

_GPT = ("token_embedding", "position_embedding", "blocks", "norm", "head")


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
        ValueError: a different kind of model, or one with parts that no stage would have; more
            stages than units; a wrong number of costs; a norm with running statistics on both sides
            of a cut.
    """
    if type(model).forward is nn.Sequential.forward:
        units = list(cast(nn.Sequential, model))
        build: Callable[[range], nn.Module] = lambda part: _slice(model, part)  # noqa: E731
    elif all(hasattr(model, name) for name in _GPT):
        check_parts("split_model", model, _GPT)
        gpt = cast(Any, model)
        first = nn.ModuleList([gpt.token_embedding, gpt.position_embedding])
        units = [first, *gpt.blocks, nn.ModuleList([gpt.norm, gpt.head])]
        build = lambda part: GPTStage(model, part, len(units))  # noqa: E731
    elif all(hasattr(model, name) for name in ("stem", "stages", "head")):
        check_parts("split_model", model, ("stem", "stages", "head"))
        units = [model.stem, *cast(Any, model).stages, model.head]
        build = lambda part: _resnet_stage(model, part, len(units))  # noqa: E731
    else:
        own = " with a forward of its own" if isinstance(model, nn.Sequential) else ""
        raise ValueError(
            f"split_model: expected an nn.Sequential, a GPT ({', '.join(_GPT)}) or a ResNet (stem, "
            f"stages, head), got {type(model).__name__}{own}"
        )
    if costs is None:
        costs = [sum(p.numel() for p in cast(nn.Module, unit).parameters()) for unit in units]
    if len(costs) != len(units):
        raise ValueError(f"split_model: {len(units)} units need as many costs, got {len(costs)}")
    return [build(part) for part in balance(costs, num_stages)]


class GPTStage(nn.Module):
    """Some consecutive units of a GPT: embeddings, blocks, norm and head.

    The first stage takes tokens_BT, the others take x_BTD; the last stage returns logits_BTV.

    Args:
        model: the GPT; its modules are shared, except those with weights that an earlier stage has.
        part: the units of this stage; unit 0 is the embeddings, unit num_units - 1 is norm and
            head.
    """

    def __init__(self, model: nn.Module, part: range, num_units: int) -> None:
        super().__init__()
        gpt = cast(Any, model)
        self.config = gpt.config
        self._embed = type(gpt).embed  # the model's own code, on the modules of this stage
        self.is_first, self.is_last = part.start == 0, part.stop == num_units
        if self.is_first:
            self.token_embedding = gpt.token_embedding
            self.position_embedding = gpt.position_embedding
        # A dict with the model's indices as keys, so that names in the state dict do not change.
        blocks = range(max(part.start - 1, 0), min(part.stop - 1, num_units - 2))
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        if self.is_last:
            self.norm = gpt.norm
            self.head = gpt.head
        tie_weights(model, self)

    def forward(self, x: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """tokens_BT or x_BTD -> x_BTD or logits_BTV."""
        self.refuse_packed(documents_BT)
        if self.is_first:
            x = self._embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x

    @staticmethod
    def refuse_packed(documents_BT: Tensor | None) -> None:
        if documents_BT is not None:
            raise PACKED.error(f"got documents_BT on {named_rank()}", where="GPTStage")


def _slice(model: nn.Module, part: range) -> nn.Module:
    return tie_weights(model, cast(nn.Sequential, model)[part.start : part.stop])


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
    return tie_weights(model, nn.Sequential(parts))
