"""`python tests/helpers/pinned.py`: what is installed, a line per package, as versions.txt has it.

A version that the oldest Python of this course cannot have is pinned for newer ones only: Debian 12
has 3.11.2. PyTorch and what it brings are left out, because builds differ by machine.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions

from packaging.specifiers import SpecifierSet

OLDEST = "3.11.0"
_NOT_PINNED = re.compile(r"(torch|nvidia|triton|cuda|setuptools|pip|minidist)\b", re.IGNORECASE)


def pin(found: Distribution) -> str:
    """The line for a package, such as "x==1.2"."""
    needs = found.metadata.get("Requires-Python") or ""
    only = ""
    if not SpecifierSet(needs).contains(OLDEST):
        [least] = [each.version for each in SpecifierSet(needs) if each.operator == ">="]
        only = f'; python_full_version >= "{least}"'
    return f"{found.name}=={found.version}{only}"


def pinned() -> list[str]:
    """The lines of all packages, by name."""
    found = {each.name: pin(each) for each in distributions() if not _NOT_PINNED.match(each.name)}
    return [found[name] for name in sorted(found, key=str.lower)]


if __name__ == "__main__":
    print(*pinned(), sep="\n")
