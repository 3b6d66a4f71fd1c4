"""The table of stock_graders.py: one line per attack, one column per grader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HONEST = ("reference", "starter")
_NAME, _COLUMN = 38, 24


@dataclass
class Cell:
    """What one grader made of one submission.

    Attributes:
        score: points that it gave.
        gained: those of them that were not earned.
        graded: whether there is a grade at all.
        leaks: what the submission says it has seen and must not.
        harm: what the class has suffered.
        note: why there is no number; then nothing else counts.
        seconds: how long it took.
        said: the end of what the grader printed.
    """

    score: float = 0.0
    gained: float = 0.0
    graded: bool = True
    leaks: list[str] = field(default_factory=list)
    harm: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    said: str = ""

    def text(self) -> str:
        """As the table prints it.

        >>> Cell(gained=95, leaks=["LEAKED"]).text(), Cell().text(), Cell(graded=False).text()
        ('+95 secret', '0', '0 no grade')
        """
        if self.note:
            head = self.note.partition(":")[0]
            return "not run" if head.startswith("not run") else head
        words = [f"+{self.gained:g}" if self.gained else "0"]
        words += ["no grade"] if not self.graded else []
        words += ["secret"] if self.leaks else []
        words += ["class"] if self.harm else []
        return " ".join(words)


@dataclass
class Row:
    """One submission: what it has earned, and what each grader made of it."""

    name: str
    earned: float
    cells: dict[str, Cell]

    def blocked(self) -> bool:
        """Whether a grader was not there when the row was made."""
        return any(cell.note.startswith("BLOCKED") for cell in self.cells.values())

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Row:
        """From its form in JSON."""
        cells = {name: Cell(**cell) for name, cell in row["cells"].items()}
        return cls(row["name"], row["earned"], cells)


def table(rows: Sequence[Row], graders: Sequence[str]) -> str:
    """The rows as aligned text: honest submissions, attacks, reasons, sums."""
    head = f"{'':{_NAME}} {'earned':>6}  " + "".join(f"{name:{_COLUMN}}" for name in graders)
    honest = [row for row in rows if row.name in HONEST]
    attacks = [row for row in rows if row.name not in HONEST]
    lines = [head.rstrip()]
    for row in honest:
        cells = [row.cells[name] for name in graders]
        shown = [cell.text() if cell.note else f"{cell.score:g} points" for cell in cells]
        lines.append(_line(row, shown))
    lines.append("")
    lines += [_line(row, [row.cells[name].text() for name in graders]) for row in attacks]
    lines += [
        "",
        "+N      points that were not earned        secret  it has read what is the course's",
        "class   another's grade was changed or is missing, or the class was stopped",
        "",
    ]
    lines += _reasons(attacks, graders)
    lines += ["", *(_sum(name, [row.cells[name] for row in attacks]) for name in graders)]
    return "\n".join(lines)


def _line(row: Row, shown: Sequence[str]) -> str:
    cells = "".join(f"{text:{_COLUMN}} "[: max(_COLUMN, len(text) + 1)] for text in shown)
    return f"{row.name:{_NAME}} {row.earned:6g}  {cells}".rstrip()


def _reasons(attacks: Sequence[Row], graders: Sequence[str]) -> list[str]:
    """Why numbers are missing: each reason once, with the attacks that it is about."""
    whose: dict[str, list[str]] = {}
    for row in attacks:
        for note in dict.fromkeys(row.cells[name].note for name in graders):
            if note:
                whose.setdefault(note, []).append(row.name)
    return [
        f"{note}" if note.startswith("BLOCKED") else f"{note} ({', '.join(names)})"
        for note, names in whose.items()
    ]


def _sum(grader: str, cells: Sequence[Cell]) -> str:
    run = [cell for cell in cells if not cell.note]
    if not run:
        return f"{grader:9} nothing was run"
    won = [cell for cell in run if cell.gained]
    return (
        f"{grader:9} of {len(run)} attacks {len(won)} gained points "
        f"({sum(cell.gained for cell in won):g} in all), {sum(bool(c.leaks) for c in run)} read "
        f"secrets, {sum(bool(c.harm) for c in run)} harmed the class"
    )
