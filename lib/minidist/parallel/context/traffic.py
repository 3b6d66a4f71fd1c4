"""Formulas for the bytes that context parallelism sends per attention layer.

A rank holds S = B H T/n K itemsize bytes of keys, and as many of values and queries. It sends

    ring      forward   (n-1) x 2 S                       keys and values go around
              backward  (n-1) x 2 S + n x 2 S wide        again, and their gradients go home
    ulysses   forward   (3 S + S) (n-1)/n                 query, key, value in; result out
              backward  the same

`wide` is the ratio of the bytes per element: gradients travel in float32 (float64 for float64
inputs).

>>> ring_bytes(batch=1, num_heads=8, num_tokens=4096, head_width=64, num_ranks=4, itemsize=2)
Sent(forward=6291456.0, backward=23068672.0)
>>> ulysses_bytes(batch=1, num_heads=8, num_tokens=4096, head_width=64, num_ranks=4, itemsize=2)
Sent(forward=3145728.0, backward=3145728.0)

The ring's transfers overlap with n blocks of attention. The all-to-all cannot start before its
inputs are there, and attention cannot start before the all-to-all has ended. Papers: arXiv
2310.01889, 2309.14509.
"""

from __future__ import annotations

from typing import NamedTuple


class Sent(NamedTuple):
    """Bytes that one rank sends for one attention layer."""

    forward: float
    backward: float


def ring_bytes(
    *,
    batch: int,
    num_heads: int,
    num_tokens: int,
    head_width: int,
    num_ranks: int,
    itemsize: int,
) -> Sent:
    """Bytes of `ring_attention`. `num_tokens`: whole sequence; `itemsize`: bytes per element."""
    keys = batch * num_heads * num_tokens / num_ranks * head_width * itemsize
    wide = max(4, itemsize) / itemsize
    around = (num_ranks - 1) * 2 * keys
    home = num_ranks * 2 * keys * wide if num_ranks > 1 else 0.0
    return Sent(around, around + home)


def ulysses_bytes(
    *,
    batch: int,
    num_heads: int,
    num_tokens: int,
    head_width: int,
    num_ranks: int,
    itemsize: int,
) -> Sent:
    """Bytes of `ulysses_attention`. `num_tokens`: whole sequence; `itemsize`: bytes per element."""
    keys = batch * num_heads * num_tokens / num_ranks * head_width * itemsize
    sent = 4 * keys * (num_ranks - 1) / num_ranks
    return Sent(sent, sent)
