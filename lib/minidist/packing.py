"""Several documents in one row of tokens, so that none of it is padding.

    tokens      a a a | b b | c c c      one row of 8 tokens
    documents   0 0 0   1 1   2 2 2      a token attends to earlier tokens of its own document only
    positions   0 1 2   0 1   0 1 2
    targets     a a -   b -   c c -      the last token of a document predicts nothing (-100)

`GPT` takes `documents_BT`: its logits are those of each document alone.

>>> tokens, targets, documents = pack([[5, 6, 7], [8, 9], [3, 4]], length=8)
>>> tokens.tolist(), documents.tolist()
([[5, 6, 7, 8, 9, 3, 4, 0]], [[0, 0, 0, 1, 1, 2, 2, 3]])
>>> targets.tolist()
[[6, 7, -100, 9, -100, 4, -100, -100]]
>>> document_positions(documents).tolist()
[[0, 1, 2, 0, 1, 0, 1, 0]]
>>> documents_of(torch.tensor([0, 3, 5, 8])).tolist()
[[0, 0, 0, 1, 1, 2, 2, 2]]

Letters of shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.unsupported import Unsupported

PACKED = Unsupported(
    "ContextParallelGPT, ParallelAttention, stages of a pipeline",
    "packed sequences (documents_BT)",
    instead="use minidist.model.GPT with BucketedDDP or Zero3, or parallelize_gpt; or pad one "
    "document per row",
)


def pack(documents: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put documents into rows, each into the first row that has room.

    Returns:
        tokens_BT, targets_BT (-100 where nothing is to be predicted) and documents_BT, int64.
        Padding at the end of a row is a document of its own, with token 0.

    Raises:
        ValueError: a document is empty, longer than `length`, or has floats.
    """
    rows: list[list[Sequence[int]]] = []
    for number, document in enumerate(documents):
        if not 0 < len(document) <= length:
            raise ValueError(
                f"pack: expected documents of 1 to {length} tokens, number {number} has "
                f"{len(document)}"
            )
        if torch.as_tensor(document).is_floating_point():
            raise ValueError(f"pack: expected numbers of tokens, document {number} has floats")
        fits = (row for row in rows if sum(map(len, row)) + len(document) <= length)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    tokens_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, -100)
    documents_BT = torch.zeros_like(tokens_BT)
    for b, row in enumerate(rows):
        begin = 0
        for d, document in enumerate(row):
            end = begin + len(document)
            tokens_BT[b, begin:end] = torch.as_tensor(document)
            targets_BT[b, begin : end - 1] = tokens_BT[b, begin + 1 : end]
            documents_BT[b, begin:end] = d
            begin = end
        documents_BT[b, begin:] = len(row)
    return tokens_BT, targets_BT, documents_BT


def documents_of(cu_seqlens: Tensor) -> Tensor:
    """documents_BT of one row, (1, T), from the cumulated lengths [0, l0, l0 + l1, ..., T]."""
    lengths = cu_seqlens.diff()
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or (lengths < 0).any():
        raise ValueError(
            f"documents_of: expected rising numbers that begin with 0, got {cu_seqlens.tolist()}"
        )
    return torch.repeat_interleave(lengths.long()).unsqueeze(0)


def document_positions(documents_BT: Tensor) -> Tensor:
    """Position of each token in its document, (B, T)."""
    begins = _begins(documents_BT)
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return at_T - torch.where(begins, at_T, 0).cummax(1).values


def document_mask(documents_BT: Tensor) -> Tensor:
    """Which token (row) sees which (column), (B, 1, T, T): earlier ones of its own document."""
    # If a number comes again later in the row, it means a new document.
    number_BT = _begins(documents_BT).cumsum(1)
    same = number_BT.unsqueeze(2) == number_BT.unsqueeze(1)
    return same.tril().unsqueeze(1)


def _begins(documents_BT: Tensor) -> Tensor:
    """Whether a document begins at a token, (B, T)."""
    begins = torch.ones_like(documents_BT, dtype=torch.bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return begins
