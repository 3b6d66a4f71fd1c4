"""What a criterion is: draw (trusted) -> observe (in the rank) -> judge (trusted).

`draw` makes one private dict of inputs per rank from a secret generator. `observe` runs in the
student's process, calls what the student wrote and returns raw arrays; it knows no expected
value. `judge` sees all inputs and all answers, recomputes what is right (in float64, in one
process) and lists what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autograder.criteria.limits import Limits

if TYPE_CHECKING:
    import torch

    from minidist.emulate.plan import ChargePlan
    from minidist.emulate.trace import Trace

# NumPy arrays travel raw; numbers, text, lists and dicts travel as JSON. Inputs whose names begin
# with "_" are not sent to the rank: only `judge` sees them.
Values = dict[str, Any]
Needs = Literal["nothing", "cuda", "cuda per rank"]


class Status(StrEnum):
    """How a criterion ended, for one rank or for all."""

    PASS = "PASS"  # answered, and the answer is right
    WRONG = "WRONG"  # answered, and the answer is wrong
    STUDENT_ERROR = "STUDENT_ERROR"  # the student's code raised
    TIMEOUT = "TIMEOUT"  # no answer before the deadline: a hang or an endless loop
    RANK_LOST = "RANK_LOST"  # the process ended
    NOT_RUN = "NOT_RUN"  # the check was never reached
    INVALID = "INVALID"  # the submission is not a notebook that can be graded
    BLOCKED = "BLOCKED"  # needs hardware that is not there; costs nothing
    INFRA = "INFRA"  # our own failure: not the student's, and the only one that is retried

    @property
    def is_lost(self) -> bool:
        """Whether the submission has failed; False if the criterion could not be tested."""
        return self not in (Status.PASS, Status.BLOCKED, Status.INFRA)


@dataclass(frozen=True)
class Draw:
    """What `draw` works with: the number of ranks, and a secret seed for each purpose."""

    world_size: int
    seed: Callable[[str], int]  # purpose -> 128-bit integer

    def shared(self, purpose: str = "shared") -> np.random.Generator:
        """A generator for values that all ranks may know (sizes, for example)."""
        return np.random.Generator(np.random.PCG64(self.seed(purpose)))

    def private(self, rank: int) -> np.random.Generator:
        """A generator for values that only `rank` may know."""
        return self.shared(f"rank {rank}")


def per_rank(make: Callable[[np.random.Generator], Values]) -> Callable[[Draw], list[Values]]:
    """A `draw` that makes each rank's inputs from values that only this rank may know."""

    @functools.wraps(make)
    def draw(source: Draw) -> list[Values]:
        return [make(source.private(rank)) for rank in range(source.world_size)]

    return draw


@dataclass(frozen=True)
class Context:
    """What `observe` may know about the place where it runs."""

    rank: int
    world_size: int
    device: torch.device
    broker: Any = None  # the connection to the emulated cluster, if the criterion runs on one


class HardwareMissingError(Exception):
    """`observe` found less hardware than its criterion needs; the message says what is missing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in words that teach; `rank` None means all ranks."""

    message: str
    rank: int | None = None


@dataclass(frozen=True)
class Case:
    """All that `judge` sees: what was handed out, what came back, and what the broker saw.

    Attributes:
        trace, plan: None unless the world of the criterion is emulated.
    """

    world_size: int
    inputs: Sequence[Values]
    answers: Sequence[Values]
    trace: Trace | Any = None
    plan: ChargePlan | Any = None


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One graded behaviour.

    Args:
        name: unique over all labs; also the id of the notebook's check cell.
        title: what is tested, for tables and feedback.
        task: the heading of the task to reread.
        points: full points; a criterion gives all of them or none.
        world: which process group is torch's default group while `observe` runs: "real" is a new
            group of the probe on real hardware, "emulated" is a group on the emulated cluster.
            "own" and "none" leave the default group as the student's code has left it.
        deadline_s: seconds after which ranks without an answer count as hung.
        plan: makes the compute charges of the emulated cluster from the draw.
        between_ranks: the criterion is about what ranks exchange, so a single rank always passes.
        fault_hint: is added to the message if the collectives of the emulated ranks do not match.
        stand_ins: functions of earlier tasks that the subject calls, as the notebook names them.
            If the criterion and one of `relies_on` are lost, the check runs again with the
            functions of the same names in the lab's `ours.py`, and the second run counts: one
            fault costs one criterion. Students have no `ours.py`; the referee sends it.
        relies_on: the criteria that judge what `stand_ins` replaces.
        needs: the hardware: nothing, a CUDA device, or a CUDA device for each rank of the node. If
            the hardware is missing, the criterion is BLOCKED. If it is there, the points are extra,
            on top of the lab's points.
    """

    name: str
    title: str
    task: str
    points: float
    draw: Callable[[Draw], list[Values]]
    observe: Callable[[Any, Values, Context], Values]
    judge: Callable[[Case], Iterable[Finding]]
    world: Literal["own", "none", "real", "emulated"] = "real"
    deadline_s: float = 25.0
    plan: Callable[[Draw], ChargePlan] | None = None
    between_ranks: bool = False
    fault_hint: str = ""
    stand_ins: tuple[str, ...] = ()
    relies_on: tuple[str, ...] = ()
    needs: Needs = "nothing"

    def findings(self, case: Case) -> list[Finding]:
        """What is wrong with the answers: first by rules for all criteria, then by `judge`."""
        if self.between_ranks and case.world_size == 1:
            return []
        if case.trace is not None and case.trace.faults:
            # If collectives do not match, there is no time and no traffic to judge.
            hint = f". {self.fault_hint}" if self.fault_hint else ""
            return [Finding(f"{fault}{hint}") for fault in case.trace.faults]
        return list(self.judge(case))

    @property
    def extra(self) -> bool:
        """Whether the points come on top of the lab's, because not everybody has the hardware."""
        return self.needs != "nothing"

    @property
    def listed_points(self) -> float:
        """What the criterion adds to the full marks of its lab."""
        return 0.0 if self.extra else self.points


@dataclass(frozen=True)
class Gate:
    """An idea that a lab is about.

    Attributes:
        idea: in a few words, joined by hyphens; also the name in course.toml.
        criteria: those that nobody passes without the idea.
        needed: how many of them must pass; the rest may be lost to a slip.
        at_most: the lab's points if fewer pass.
    """

    idea: str
    criteria: tuple[str, ...]
    needed: int = 1
    at_most: float = 49.0

    @property
    def without(self) -> str:
        """The beginning of `rule`."""
        return f"Without {self.idea.replace('-', ' ')} ("

    @property
    def rule(self) -> str:
        """The gate in words, for students."""
        names = ", ".join(self.criteria)
        some = names if self.needed == len(self.criteria) else f"{self.needed} of {names}"
        return f"{self.without}{some}) this lab gives at most {self.at_most:g} points"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A lab: its criteria, its world sizes, its limits.

    Attributes:
        withheld: module of minidist -> the solution in it. Neither students nor submissions that
            are graded have the module while the lab is open.
        gates: ideas without which the lab is not passed.
    """

    name: str
    title: str
    criteria: tuple[Criterion, ...]
    practice_world_size: int = 2
    grading_world_size: int = 3
    withheld: Mapping[str, str] = field(default_factory=dict)
    cell_deadline_s: float = 60.0
    limits: Limits = field(default_factory=Limits)
    gates: tuple[Gate, ...] = ()

    def __getitem__(self, name: str) -> Criterion:
        for criterion in self.criteria:
            if criterion.name == name:
                return criterion
        raise KeyError(f"{self.name} has no criterion {name!r}")

    @property
    def max_score(self) -> float:
        """Points of all criteria that count everywhere; extra points come on top."""
        return sum(criterion.listed_points for criterion in self.criteria)


@dataclass(frozen=True)
class Verdict:
    """How a criterion ended; `ranks` has one status per rank."""

    criterion: str
    status: Status
    points: float
    max_points: float
    message: str
    ranks: tuple[Status, ...] = field(default=())
    extra: bool = False

    def record(self) -> Values:
        """The public JSON form."""
        return {
            "name": self.criterion,
            "points": self.points,
            "max_points": self.max_points,
            "status": str(self.status),
            "message": self.message,
            "ranks": [{"rank": r, "status": str(s)} for r, s in enumerate(self.ranks)],
            **({"extra": True} if self.extra else {}),
        }


def named_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def differs(
    rank: int,
    what: str,
    got: Any,
    expected: np.ndarray,
    *,
    rtol: float,
    atol: float,
    hint: str = "",
) -> Finding | None:
    """A finding unless `got` is a finite array of `expected`'s shape and values.

    An `expected` or a tolerance that is not finite always gives a finding. The message names the
    first place where the arrays differ; `hint` is the likely reason.
    """
    problem = _difference(got, np.asarray(expected, dtype=np.float64), rtol, atol)
    if problem is None:
        return None
    return Finding(f"{what}: {problem}" + (f" {hint}" if hint else ""), rank)


def _difference(got: Any, expected: np.ndarray, rtol: float, atol: float) -> str | None:
    if not isinstance(got, np.ndarray):
        return "nothing was returned."
    if got.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, got {list(got.shape)}."
    if got.dtype.kind not in "fiu":
        return f"expected numbers, got {got.dtype}."
    value = got.astype(np.float64)
    if not np.isfinite(value).all():
        return "has values that are not finite (nan or inf)."
    with np.errstate(invalid="ignore"):
        allowed = atol + rtol * np.abs(expected)
    if not np.isfinite(allowed).all():
        # `expected` may come from the answer of a different rank. Without this check, every value
        # would agree with nan or inf.
        return "what it is compared with has values that are not finite (nan or inf)."
    wrong = np.abs(value - expected) > allowed
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {list(place)}" if place else ""
    by_more = " by more than rounding" if rtol or atol else ""
    right, found = f"{expected[place]:.6g}", f"{value[place]:.6g}"
    if right == found:
        right, found = f"{expected[place]:.12g}", f"{value[place]:.12g}"
    return (
        f"expected {right}{where}, got {found} "
        f"({int(wrong.sum())} of {wrong.size} values differ{by_more})."
    )


def integer(value: Any, what: str) -> int:
    """`value` as an int; raises a clear TypeError if a student returned something else."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__} {value!r}")
    return int(value)


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Separates JSON fields from arrays (for a `messages.Message`)."""
    arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
    return {k: v for k, v in values.items() if k not in arrays}, arrays
