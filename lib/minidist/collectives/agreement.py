"""The comparison behind `check=True`: before a collective, all ranks exchange what they will do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from minidist.collectives.algorithms import ring_all_gather_steps
from minidist.collectives.transport import Transport, even_chunks, run_steps
from minidist.errors import MismatchError

_DESCRIPTION_BYTES = 512


def agree(transport: Transport, device: torch.device, about: str) -> int:
    """Compare what the ranks of a group are about to do (`CollectiveCall.describe`).

    Returns:
        The bytes that this rank sent.

    Raises:
        MismatchError: on every rank; the message names the ranks and what each of them calls.
    """
    rows, num_bytes = gather_texts(transport, device, about, _DESCRIPTION_BYTES)
    callers = who_says_what(enumerate(rows))
    if len(callers) > 1:
        raise MismatchError(
            f"the ranks of group {transport.group.group_name!r} do not agree: {tell(callers)}",
            rank=transport.rank,
        )
    return num_bytes


def agree_on_sizes(
    transport: Transport, device: torch.device, sends: list[int], expects: list[int]
) -> int:
    """Compare, for every pair of ranks, what the source sends with what the target expects.

    Args:
        sends, expects: for each rank of the group, the number of elements that this rank sends to
            it, and expects from it.

    Returns:
        The bytes that this rank sent.

    Raises:
        MismatchError: on every rank; the message names the first pair of ranks that disagrees.
    """
    n = transport.size
    table = torch.zeros((n, 2, n), dtype=torch.int64, device=device)
    table[transport.rank] = torch.tensor([sends, expects])
    num_bytes = run_steps(ring_all_gather_steps(n), even_chunks(table.view(-1), n), transport)
    rows = table.tolist()
    for source in range(n):
        for target in range(n):
            sent, expected = rows[source][0][target], rows[target][1][source]
            if sent != expected:
                raise MismatchError(
                    f"the ranks of group {transport.group.group_name!r} do not agree: rank "
                    f"{source} sends {sent} elements to rank {target}, which expects {expected}",
                    rank=transport.rank,
                )
    return num_bytes


def gather_texts(
    transport: Transport, device: torch.device, text: str, num_bytes: int
) -> tuple[list[str], int]:
    """Gather one text from every rank.

    All messages have the same fixed size, so this works whatever the ranks disagree on.

    Args:
        num_bytes: size of a message. A longer text is cut, and ends with the whole text's digest.

    Returns:
        The texts in the order of the ranks, and the bytes that this rank sent.
    """
    data = text.encode()
    if len(data) > num_bytes:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: num_bytes - len(digest) - 1] + b" " + digest
    flat = torch.zeros(transport.size * num_bytes, dtype=torch.uint8, device=device)
    chunks = even_chunks(flat, transport.size)
    own = torch.frombuffer(bytearray(data.ljust(num_bytes)), dtype=torch.uint8)
    chunks(transport.rank, 1).copy_(own)
    num_sent = run_steps(ring_all_gather_steps(transport.size), chunks, transport)
    rows = flat.cpu().view(transport.size, -1).numpy()
    return [bytes(row).decode(errors="replace").strip() for row in rows], num_sent


def who_says_what(rows: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Map each different text to the ranks that gave it. `rows` has (rank, text) of each rank."""
    callers: dict[str, list[int]] = {}
    for rank, row in rows:
        callers.setdefault(row, []).append(rank)
    return callers


def tell(callers: dict[str, list[int]]) -> str:
    return "; ".join(f"rank {', '.join(map(str, r))}: {row}" for row, r in callers.items())
