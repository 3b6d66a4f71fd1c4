"""Models as other libraries write them: outputs that are objects, tied embeddings, compiled parts.

A model of transformers returns a class of its own, and some of its layers do, too.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.errors import LaunchError
from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import Zero3


@dataclasses.dataclass
class Output:
    loss: Any = None
    logits: Any = None
    hidden: Any = None


class Slotted:
    __slots__ = ("logits", "loss")

    def __init__(self, loss: Any, logits: Any) -> None:
        self.loss, self.logits = loss, logits


MAKES = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "data class": lambda loss, logits: Output(loss=loss, logits=logits),
    "nested": lambda loss, logits: SimpleNamespace(loss=loss, inner=[Output(hidden=(logits,))]),
    "slots": Slotted,
}


class Layer(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.norm, self.linear, self.make = nn.LayerNorm(6), nn.Linear(6, 6), make

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.linear(self.norm(x)))
        return self.make(y.sum(), y)


def part(output: Any, name: str) -> Any:
    if name == "logits" and hasattr(output, "inner"):
        return output.inner[0].hidden[0]
    return output[name] if isinstance(output, dict) else getattr(output, name)


class LanguageModel(nn.Module):
    """Takes and returns what a causal language model of transformers does."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.embedding = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Layer(make) for _ in range(2))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + part(layer(x), "logits")
        logits = self.head(x)
        return self.make(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def step(model: Any, optimized: Any, ids: Any) -> None:
    optimizer = torch.optim.SGD(optimized.parameters(), lr=1.0)
    part(model(input_ids=ids, labels=ids.roll(1, 1)), "loss").backward()
    optimizer.step()


def gap_to_one_process(kind: str, how: str) -> float:
    dist.init_process_group("gloo")
    alone = LanguageModel(MAKES[kind]).double()
    model = copy.deepcopy(alone)
    ids = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(1))
    step(alone, alone, ids)
    own = ids[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    if how == "zero3":
        zero = Zero3(model, units=model.layers)
        step(model, model, own)
        got = zero.full_state_dict()
    else:
        step(BucketedDDP(model, find_unused=how == "ddp find_unused"), model, own)
        got = model.state_dict()
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("how", ["ddp find_unused", "zero3"])
def test_outputs_of_any_class_train_as_in_one_process(kind: str, how: str) -> None:
    assert max(run(gap_to_one_process, 2, kind, how)) < 1e-12


def compiled() -> dict[str, float]:
    dist.init_process_group("gloo")
    return {how: gap_when_compiled(how) for how in ("ddp of it", "ddp", "zero3")}


def gap_when_compiled(how: str) -> float:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    alone = copy.deepcopy(model)
    compile = torch.compile(backend="aot_eager")  # no C++ compiler is needed
    zero = None
    if how == "ddp of it":
        forward = BucketedDDP(compile(model))
    elif how == "ddp":
        forward = compile(BucketedDDP(model, gradient_as_bucket_view=True))
    else:
        zero = Zero3(model, units=[model[0], model[2]])
        forward = compile(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    x = torch.randn(4, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        alone(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    got = model.state_dict() if zero is None else zero.full_state_dict()
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.slow
def test_compiled_modules_train_as_in_one_process() -> None:
    for gaps in run(compiled, 2, deadline_s=120):
        assert max(gaps.values()) < 1e-12, gaps


def train_with_nan(where: str, check: bool) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.ones(2, 4)
    if where == "start" and dist.get_rank() == 0:
        model[2].weight.data[3, 3] = float("nan")
    if where == "batch" and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    zero = Zero3(model, units=[model[0], model[2]])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if not check:
            zero.clip_grad_norm_(1.0)
        optimizer.step()
        if check:
            zero.check_finite()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("where", "check", "said"),
    [
        ("start", False, "in the parameters 2.weight (1 on rank 1) and in the gradients 0.weight"),
        ("batch", False, "in the parameters 0.weight (20 on rank 0, 12 on rank 1); 0.bias"),
        ("batch", True, "in the parameters 0.weight (20 on rank 0, 12 on rank 1); 0.bias"),
    ],
)
def test_zero3_names_the_parameters_that_are_not_finite(where, check, said) -> None:
    with pytest.raises(LaunchError) as caught:
        run(train_with_nan, 2, where, check)
    text = str(caught.value)
    assert f"Zero3: elements that are nan or inf {said}" in text
    assert "also failed: rank" in text  # on every rank: none waits
