"""`[Note: …]`: a text that stands once, on a line of its own, and that other files refer to."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTE = re.compile(r"\[Note: ([^\]…]+)\]")
ITS_LINE = re.compile(r"^(?:#+ )?\[Note: ([^\]…]+)\]$", re.MULTILINE)


def test_each_note_stands_once_and_is_referred_to():
    files = [
        path for folder in ("lib", "autograder") for path in (ROOT / folder).rglob("*.[pm][yd]")
    ]
    texts = [path.read_text() for path in files]
    stand = Counter(name for text in texts for name in ITS_LINE.findall(text))
    named = Counter(name for text in texts for name in NOTE.findall(text))
    assert stand
    assert set(named) == set(stand), "referred to, but written nowhere"
    assert set(stand.values()) == {1}, "written twice"
    assert all(named[name] > stand[name] for name in stand), "no file refers to it"
