"""The table that `%ranks` shows. What a rank says of itself is checked, bounded and only shown."""

from __future__ import annotations

from typing import Any

HEAD = ("rank", "state", "process group", "device", "memory", "last collective")


def _words(report: dict[str, Any], key: str) -> str:
    value = report.get(key)
    return " ".join(value.split())[:80] if isinstance(value, str) and value.strip() else "-"


def _size(value: Any) -> str:
    """
    >>> _size(3 << 20), _size(5 << 30), _size("x")
    ('3 MiB', '5.0 GiB', '-')
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        return "-"
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"


def row(rank: int, state: str, report: dict[str, Any] | None, node: str = "") -> tuple[str, ...]:
    """One line: `report` is the answer of the rank's companion (see `diagnose.status`)."""
    report = report or {}
    memory = _size(report.get("memory"))
    if "device_memory" in report:
        memory += f", {_size(report['device_memory'])} on the device"
    told = (_words(report, key) for key in ("group", "device"))
    name = f"{rank} on {node}" if node else str(rank)
    return (name, state, *told, memory, _words(report, "collective"))


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned text, one line per rank under a head.

    >>> print(table([row(0, "ready", {"memory": 1 << 20}), row(1, "ended", None)]), end="")
    rank  state  process group  device  memory  last collective
    0     ready  -              -       1 MiB   -
    1     ended  -              -       -       -
    """
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (HEAD, *rows)
    )
    return "".join(f"{line}\n" for line in lines)
