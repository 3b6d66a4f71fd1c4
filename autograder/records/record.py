"""The result of grading one submission, and its JSON form.

The JSON form is what the journal keeps, what a job hands back and what `autograder grade --json`
prints. The readers do not trust the JSON: an edited journal, an older version, or a job that a
submission has harmed may have written it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autograder.criteria.criterion import Status, Verdict

MAX_NUMBER = 1e9
_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of grading one submission.

    Attributes:
        submission: path of the notebook.
        criteria: the verdicts, in the lab's order.
        sandboxed: whether it ran in the box; False if nothing was run.
        num_gpus: number of GPUs of the machine that graded it.
    """

    submission: str
    student: str
    lab: str
    world_size: int
    seconds: float
    sandboxed: bool
    criteria: tuple[Verdict, ...]
    num_gpus: int = 0

    @property
    def infra(self) -> Verdict | None:
        """The first verdict that tells of a failure of the grader; None if there is none."""
        return next((c for c in self.criteria if c.status is Status.INFRA), None)

    @property
    def score(self) -> float | None:
        """Points of all criteria; None if the grader failed."""
        total = sum(c.points for c in self.criteria)
        return None if self.infra else round(total, 6)  # no 48.95000000000001 in a table

    @property
    def max_score(self) -> float:
        """Points of all criteria, without extra points."""
        return sum(c.max_points for c in self.criteria if not c.extra)

    @property
    def by_name(self) -> dict[str, Verdict]:
        """Criterion -> verdict."""
        return {c.criterion: c for c in self.criteria}

    def to_json(self) -> dict[str, Any]:
        """The public JSON form; a failure of the grader has no points."""
        criteria = [c.record() for c in self.criteria]
        return {
            "submission": self.submission,
            "student": self.student,
            "lab": self.lab,
            "world_size": self.world_size,
            "score": self.score,
            "max_score": self.max_score,
            "seconds": self.seconds,
            "sandboxed": self.sandboxed,
            "num_gpus": self.num_gpus,
            "criteria": [c | {"points": None} for c in criteria] if self.infra else criteria,
        }

    @classmethod
    def from_json(cls, value: object) -> Record:
        """The record in JSON that `to_json` has made; unknown fields are ignored.

        Raises:
            ValueError: a field is missing or wrong; the message names it.
        """
        json = read_object(value, "record")
        each = enumerate(read_field(json, "criteria", list, "record"))
        record = cls(
            submission=_name(json, "submission", "record"),
            student=_name(json, "student", "record"),
            lab=_name(json, "lab", "record"),
            world_size=read_field(json, "world_size", int, "record"),
            seconds=read_field(json, "seconds", float, "record"),
            sandboxed=read_field(json, "sandboxed", bool, "record"),
            criteria=tuple(_verdict(item, f"record.criteria[{i}]") for i, item in each),
            num_gpus=read_field({"num_gpus": 0} | json, "num_gpus", int, "record"),
        )
        if not record.lab.isidentifier():  # it becomes a part of paths
            raise ValueError(f"record.lab: expected a lab's name, got {reprlib.repr(record.lab)}")
        if len(record.by_name) != len(record.criteria):
            raise ValueError("record.criteria: expected different names, got one of them twice")
        for name, total in (("score", record.score), ("max_score", record.max_score)):
            if total is None:
                continue
            given = read_field(json, name, float, "record")
            if abs(given - total) > 1e-6:
                raise ValueError(f"record.{name}: its criteria add up to {total:g}, got {given:g}")
        return record


def _verdict(value: object, where: str) -> Verdict:
    json = read_object(value, where)
    status = _status(json, where)
    points = 0.0 if status is Status.INFRA else read_field(json, "points", float, where)
    ranks = []
    for rank, item in enumerate(read_field(json, "ranks", list, where)):
        place = f"{where}.ranks[{rank}]"
        ranks.append(_status(read_object(item, place), place))
        if (given := read_field(item, "rank", int, place)) != rank:
            raise ValueError(f"{place}.rank: expected {rank}, got {given}")
    return Verdict(
        criterion=_name(json, "name", where),
        status=status,
        points=points,
        max_points=read_field(json, "max_points", float, where),
        message=read_field(json, "message", str, where),
        ranks=tuple(ranks),
        extra=read_field({"extra": False} | json, "extra", bool, where),
    )


def _status(json: Mapping[str, Any], where: str) -> Status:
    status = read_field(json, "status", str, where)
    try:
        return Status(status)
    except ValueError:
        expected = ", ".join(Status)
        raise ValueError(
            f"{where}.status: expected one of {expected}, got {reprlib.repr(status)}"
        ) from None


def _name(json: Mapping[str, Any], name: str, where: str) -> str:
    text = read_field(json, name, str, where)
    if "\0" in text:  # no path can contain it
        raise ValueError(f"{where}.{name}: expected a name, got {reprlib.repr(text)}")
    return text


# --- JSON from anywhere ---------------------------------------------------------------------------


def read_object(value: object, where: str) -> dict[str, Any]:
    """A JSON object, or ValueError."""
    return read_field({"": value}, "", dict, where)


def read_field(json: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """A field of a JSON object, which must be of this kind; `float` accepts whole numbers too.

    Raises:
        ValueError: the field is missing or of a different kind, or a number is not from 0 to
            `MAX_NUMBER`.
    """
    place, expected = f"{where}.{name}" if name else where, _KINDS[kind]
    if name not in json:
        raise ValueError(f"{place}: expected {expected}, got nothing")
    value = json[name]
    right = isinstance(value, (int, float) if kind is float else kind)
    if kind in (int, float):
        expected += f" from 0 to {MAX_NUMBER:g}"
        right = right and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER  # false for nan
    if not right:
        raise ValueError(f"{place}: expected {expected}, got {reprlib.repr(value)}")
    return value
