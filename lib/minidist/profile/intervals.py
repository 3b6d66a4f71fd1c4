"""Sets of points on the time axis, as sorted, disjoint intervals.

A profile needs only three operations: union (`merge`), intersection and difference. Each operation
is one pass over sorted intervals, O(n log n) or O(n).

>>> busy = merge([(0, 2), (1, 3), (5, 6)])
>>> busy
[(0, 3), (5, 6)]
>>> intersect(busy, [(2, 5.5)]), subtract(busy, [(2, 5.5)])
([(2, 3), (5, 5.5)], [(0, 2), (5.5, 6)])
>>> length(busy)
4.0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as sorted and disjoint intervals. Touching intervals become one; empty intervals
    are removed.

    The remaining functions of this module take and return lists of this form.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The points in both a and b."""
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        # The interval that ends first cannot overlap any further interval.
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The points in `a` that are not in `b`."""
    left: list[Interval] = []
    first = 0
    for start, end in a:
        at = start
        while first < len(b) and b[first][1] <= start:
            first += 1
        for hole_start, hole_end in itertools.islice(b, first, None):
            if hole_start >= end:
                break
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left


def clip(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The points of the intervals between `start` and `end`."""
    return intersect(intervals, [(start, end)]) if start < end else []


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths."""
    return math.fsum(end - start for start, end in intervals)
