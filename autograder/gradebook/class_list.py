"""Finds the people of a class that a download names: by id, address, name or group.

Names match if they are equal but for case, accents and signs; similar names are only proposed.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from autograder.gradebook.database import Person, same_name
from autograder.gradebook.handed_in import Owner
from autograder.gradebook.roster import may_be_id
from autograder.submission.find import display_name

_NEAR = 3  # names that are proposed


class ClassList:
    """Finds the people that a download means."""

    def __init__(self, people: Sequence[Person], said: Mapping[str, str]) -> None:
        self.people, self.said = people, said
        self.used: set[str] = set()
        self.problems: dict[str, None] = {}  # in order, each once
        self.numbers: dict[str, Owner] = {}  # student -> the first owner that was this student
        self.by_key: dict[str, set[str]] = {}
        self.by_name: dict[str, set[str]] = {}
        self.groups: dict[str, set[str]] = {}
        for person in people:
            for key in person.names() | ({same_name(person.github)} if person.github else set()):
                self.by_key.setdefault(key, set()).add(person.id)
            for name in _forms(person):
                self.by_name.setdefault(name, set()).add(person.id)
            if person.group:
                self.groups.setdefault(plain(person.group), set()).add(person.id)

    def find(self, owner: Owner) -> list[str]:
        """The students; empty if there is a problem, which is noted in `problems`."""
        name = next((n for n in (owner.label, *owner.names[:1]) if n in self.said), None)
        if name is not None:
            self.used.add(name)
            student = self.said[name]
            if not student:
                return []
            if student in {person.id for person in self.people}:
                return [student]
            return self._unclear(owner, f"the class has no {student!r}")
        keys = {key if key.startswith("LMS ") else same_name(key) for key in owner.keys}
        found = set().union(*(self.by_key.get(key, set()) for key in keys))
        named = self._named(owner.names)
        if not self.people and may_be_id(owner.label):  # nbgrader's own folders
            return [owner.label]
        if len(found) > 1:
            return self._unclear(owner, f"could be {' or '.join(sorted(found))}")
        if found and named and not found <= named:
            others = " or ".join(sorted(named))
            return self._unclear(
                owner, f"its id is that of {min(found)}, its name that of {others}"
            )
        if group := self._group(owner.names):
            return sorted(group | found)
        if found or len(named) == 1:
            [student] = found or named
            before = self.numbers.setdefault(student, owner)
            if owner.number != before.number:
                return self._unclear(
                    owner, f"{owner.number} and {before.number} are both {student}"
                )
            return [student]
        if named:
            return self._unclear(owner, f"could be {' or '.join(sorted(named))}")
        return self._unclear(owner, self._nearest(owner))

    def _named(self, names: Sequence[str]) -> set[str]:
        for name in names:
            if found := self.by_name.get(plain(name)) or self.by_key.get(same_name(name)):
                return found
        return set()

    def _group(self, names: Sequence[str]) -> set[str]:
        return next(
            (self.groups[plain(name)] for name in names if plain(name) in self.groups), set()
        )

    def _unclear(self, owner: Owner, why: str) -> list[str]:
        self.problems[f"{display_name(owner.label)}: {why}"] = None
        return []

    def _nearest(self, owner: Owner) -> str:
        known = self.by_name | self.by_key
        near: dict[str, None] = {}
        for name in (*owner.names, *owner.keys):
            for each in difflib.get_close_matches(plain(name), known, n=_NEAR, cutoff=0.5):
                near |= dict.fromkeys(sorted(known[each]))
        names = " or ".join(list(near)[:_NEAR])
        return "not in the class list" + (f"; did you mean {names}?" if names else "")


def plain(name: str) -> str:
    """A name without what downloads leave out: case, accents, spaces and signs.

    >>> plain("Gödel, Kurt-Friedrich")
    'godelkurtfriedrich'
    """
    apart = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in apart if c.isalnum())


def _forms(person: Person) -> Iterator[str]:
    first, last = person.first_name, person.last_name
    if first or last:
        yield from {plain(first + last), plain(last + first)}
