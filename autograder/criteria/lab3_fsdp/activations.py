"""The criterion for recomputing activations: what units keep, what they compute again, and when.

Each block of a small model writes down its forward and backward passes, and the memory that its
inner activation takes. A submission may use `torch.utils.checkpoint` around `forward`, torch's
wrapper, hooks for saved tensors, or its own autograd function. It may also compute a unit again
while the unit that goes backward right before it is still at work.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import read_tensor, returned, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

WIDTH, INNER, BATCH, BLOCKS, STEPS = 5, 9, 4, 5, 3
EVALUATED = 2  # this step is in eval mode, and nothing that goes into block 0 needs a gradient
MOST_AT_ONCE = 2  # units that have been computed again and wait for their backward
RTOL, ATOL = 1e-8, 1e-10


class _Noted(nn.Linear):
    """A layer that calls `tell` whenever it computes."""

    def __init__(self, inputs: int, outputs: int, tell: Callable[[], object]) -> None:
        super().__init__(inputs, outputs)
        self._tell = tell

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        self._tell()
        return super().forward(input)


class _Block(nn.Module):
    """x + gain * W dropout(tanh(V x)); it writes down when it runs, and what it holds."""

    def __init__(self, number: int, diary: _Diary) -> None:
        super().__init__()
        self.up = _Noted(WIDTH, INNER, lambda: diary.inner.append(number))
        self.down = nn.Linear(INNER, WIDTH)
        self._note = lambda inner: diary.note(number, inner)

    def forward(self, x: torch.Tensor, *, gain: torch.Tensor) -> torch.Tensor:
        """The residual block."""
        inner = torch.tanh(self.up(x))
        self._note(inner)
        dropped = nn.functional.dropout(inner, 0.4, self.training)  # no module of its own
        return x + gain * self.down(dropped)


class _Model(nn.Module):
    """Blocks, which share a gain that they get by keyword."""

    def __init__(self, diary: _Diary) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(_Block(number, diary) for number in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks, one after the other."""
        for block in self.blocks:
            x = block(x, gain=self.gain)
        return x


class _Diary:
    """Passes in their order, as pairs (pass, block); and the inner activations that were made."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int]] = []
        self.inner: list[int] = []  # the block, each time that its first layer computes
        self._made: list[tuple[int, StorageWeakRef]] = []

    def note(self, number: int, inner: torch.Tensor) -> None:
        """A forward pass of a block; its backward pass is noted when it comes."""
        self.passes.append(("forward", number))
        self._made.append((number, StorageWeakRef(inner.untyped_storage())))
        if inner.requires_grad:
            inner.register_hook(lambda _: self.passes.append(("backward", number)))

    def held(self) -> list[int]:
        """The blocks whose inner activation is in memory."""
        gc.collect()
        return sorted({number for number, made in self._made if not made.expired()})


def _build(seed: int, diary: _Diary) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model and the inputs of each step; everything depends on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    model = _Model(diary).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    shape = (BATCH, WIDTH)
    return model, [torch.randn(shape, generator=generator).double() for _ in range(STEPS)]


def _steps(model: Any, plain: Any, batches: list[torch.Tensor], diary: _Diary) -> Iterator[Values]:
    """What each step gives. Random numbers are drawn between forward and backward, too."""
    for number, x in enumerate(batches):
        model.train(number != EVALUATED)
        plain.gain.requires_grad_(number != EVALUATED)
        diary.passes.clear()
        diary.inner.clear()
        out = read_tensor(model(x), "the model")
        held = diary.held()
        torch.rand(3)
        out.square().sum().backward()
        inner = list(diary.inner)
        passes = list(diary.passes)
        yield {"out": out.detach().numpy(), "held": held, "passes": passes, "inner": inner}


def draw(source: Draw) -> list[Values]:
    """A seed of its own for each rank; the block that is in no unit is never the first."""
    left_over = int(source.shared().integers(1, BLOCKS))
    seeds = [source.private(rank).integers(1 << 31) for rank in range(source.world_size)]
    return [{"seed": int(seed), "left_over": left_over} for seed in seeds]


def observe(recompute_units: Any, inputs: Values, context: Context) -> Values:
    """Three steps of a model of which all blocks but one recompute."""
    diary = _Diary()
    plain, batches = _build(inputs["seed"], diary)
    parameters, names = dict(plain.named_parameters()), list(plain.state_dict())
    units = [b for i, b in enumerate(plain.blocks) if i != inputs["left_over"]]  # type: ignore
    answer: Values = {"steps": []}
    with torch.random.fork_rng(devices=[]):
        model = returned(recompute_units(plain, units), "recompute_units")
        if not isinstance(model, nn.Module):
            raise TypeError(f"recompute_units: expected the model, got {type(model).__name__}")
        answer["renamed"] = [name for name in names if name not in model.state_dict()]
        torch.manual_seed(inputs["seed"])
        for number, step in enumerate(_steps(model, plain, batches, diary)):
            answer[f"out/{number}"] = step.pop("out")
            answer["steps"].append(step)
            for name, p in parameters.items():
                if p.grad is not None:
                    answer[f"{number}/{name}"] = p.grad.numpy().copy()
                p.grad = None
    return answer


def _expected(seed: int) -> Values:
    """Outputs and gradients without recomputation."""
    diary, found = _Diary(), {}
    model, batches = _build(seed, diary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, step in enumerate(_steps(model, model, batches, diary)):
            found[f"out/{number}"] = step["out"]
            for name, p in model.named_parameters():
                if p.requires_grad:
                    found[f"{number}/{name}"] = oracle.grad_of(p).copy()
                p.grad = None
    return found


def judge(case: Case) -> Iterator[Finding]:
    """Units hold nothing of their inside after forward, and the training is the same.

    Any way to recompute is right, and a unit may be computed again one turn early.
    """
    for rank, answer in enumerate(case.answers):
        problem = _renamed(answer) or _passes(answer, case.inputs[rank]["left_over"])
        if problem:
            yield Finding(problem, rank)
        elif wrong := _values(answer, _expected(case.inputs[rank]["seed"]), rank):
            yield wrong


def _renamed(answer: Values) -> str:
    renamed = told(answer, "renamed")
    if renamed == []:
        return ""
    first = str(renamed[0])[:80] if isinstance(renamed, list) else "names"
    return f"state_dict() has no {first} any more: names have changed, and checkpoints do not fit."


def _passes(answer: Values, left_over: int) -> str:
    """What is wrong with the order of passes, or with what is held; "" if nothing is."""
    steps = told(answer, "steps")
    if not isinstance(steps, list) or len(steps) != STEPS:
        return f"expected {STEPS} steps, got {str(steps)[:100]}."
    for number, step in enumerate(steps):
        try:
            passes = [tuple(p) for p in step["passes"]]
            problem = _step_problem(step["held"], passes, left_over) or _inner(step["inner"])
        except (TypeError, KeyError, ValueError, AttributeError):
            problem = "what the blocks wrote down is not readable."
        if problem:
            evaluated = ", in eval mode, and no input of block 0 needs a gradient"
            return f"Step {number}{evaluated * (number == EVALUATED)}: {problem}"
    return ""


def _inner(computed: Any) -> str:
    """What is wrong with how often layers inside of the blocks ran; "" if nothing is."""
    times = max((computed.count(number) for number in range(BLOCKS)), default=0)
    if times <= 2:
        return ""
    return (
        f"a layer inside of a block was computed {times} times, the block itself twice at most. Is "
        "something inside of a unit recomputed once more?"
    )


def _step_problem(held: Any, passes: list[Any], left_over: int) -> str:
    kept = [number for number in held if number != left_over]
    if kept:
        return (
            f"after forward, blocks {kept} still hold what they have computed inside. They are "
            "units: only their inputs should be left."
        )
    again: list[int] = []  # computed again, and not yet at its backward
    begun = False
    count = dict.fromkeys(range(BLOCKS), 0)
    for kind, number in passes:
        begun = begun or kind == "backward" or count[number] > 0
        if kind == "forward":
            count[number] += 1
            again += [number] * begun
        elif number in again:
            again.remove(number)
        if len(again) > MOST_AT_ONCE:
            return (
                f"in backward, blocks {sorted(again)} were computed again before the backward of "
                "any of them: all that they hold is in memory at once. Each unit should be "
                "computed again by itself, when its backward comes."
            )
    if count[left_over] != 1:
        return (
            f"block {left_over} is in no unit, and it was computed {count[left_over]} times; "
            "expected once."
        )
    often = {number: times for number, times in count.items() if times > 2}
    return f"blocks were computed more than twice: {often} (block: times)." if often else ""


def _values(answer: Values, expected: Values, rank: int) -> Finding | None:
    for name in expected:
        if name not in answer:
            step, _, what = name.partition("/")
            hint = " The input of block 0 needs no gradient; its weights do." * (
                "blocks.0." in what
            )
            return Finding(f"step {step}, gradient of {what}: there is none.{hint}", rank)
    for name, right in expected.items():
        number, _, what = name.partition("/")
        if number == "out":
            label, hint = f"step {what}, the output", ""
            if what != "0":
                hint = (
                    "Step 0 was right. Dropout draws from the same stream of random numbers; "
                    "recomputing must leave it where it was."
                )
        else:
            label = f"step {number}, gradient of {what}"
            hint = (
                "The output is right. Does the second forward draw the dropout masks of the first?"
            )
        if wrong := differs(rank, label, answer[name], right, rtol=RTOL, atol=ATOL, hint=hint):
            return wrong
    return None
