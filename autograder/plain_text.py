"""Makes untrusted text safe for a terminal, a page and a spreadsheet; defines marks of verdicts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console


class Mark(NamedTuple):
    """How a status is shown: by symbol and colour, never by colour alone."""

    symbol: str
    style: str
    meaning: str


MARKS = {
    "PASS": Mark("✓", "green", "right on every rank"),
    "WRONG": Mark("✗", "red", "ran, and gave a wrong answer"),
    "STUDENT_ERROR": Mark("!", "yellow", "the student's code raised an error"),
    "TIMEOUT": Mark("∞", "magenta", "no answer in time: a hang or an endless loop"),
    "RANK_LOST": Mark("†", "bright_red", "a rank's process ended"),
    "NOT_RUN": Mark("·", "bright_black", "the check was never reached"),
    "INVALID": Mark("–", "bright_black", "not a notebook that can be graded"),
    "BLOCKED": Mark("○", "cyan", "needs hardware that is not here; costs nothing"),
    "INFRA": Mark("?", "bright_yellow", "the grader itself failed; will be tried again"),
}
_MESSAGE_CHARS = 6000
# Terminal sequences: CSI, then OSC/DCS/APC/PM/SOS with their text, then any other two-byte escape.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)


def clean(text: object, limit: int = _MESSAGE_CHARS) -> str:
    """Removes terminal sequences and every character that reorders or hides text."""
    plain = _ESCAPES.sub("", str(text)).expandtabs(4).replace("\r\n", "\n").replace("\r", "\n")
    plain = "".join(c for c in plain if c == "\n" or not is_hidden(c))
    return plain if len(plain) <= limit else plain[:limit] + " […]"


def is_hidden(character: str) -> bool:
    """Whether a character controls, reorders or hides text instead of being text."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


def first_line(text: object) -> str:
    """The first line that is not empty, made safe; empty if there is none."""
    return next(iter(clean(text).strip().splitlines()), "")


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def say(console: Console, line: str) -> None:
    """Prints text on the terminal as it is, without markup and without cutting lines."""
    console.print(clean(line), markup=False, highlight=False, soft_wrap=True)


def spreadsheet(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    # Some spreadsheets use ";" as separator: it then starts a new cell within an unquoted text.
    cells = re.split(r"([;\t\n]\s*)", text)
    return "".join(f"'{cell}" if _is_formula(cell) else cell for cell in cells)


def _is_formula(cell: str) -> bool:
    # Some spreadsheets treat full-width signs like the usual signs.
    plain = unicodedata.normalize("NFKC", cell.lstrip()[:1])
    return plain.startswith(("=", "+", "-", "@", "|", "%"))
