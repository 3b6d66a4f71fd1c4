"""The content of the reply to a cell."""

from __future__ import annotations

import json
from typing import Any

from minidist.kernel.cell import printable


def ok(reply: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
    """Content for a cell that succeeded, from the lowest rank's `reply` and the ranks' `states`."""
    keep = {
        key: reply[key]
        for key in ("payload", "user_expressions")
        if key in reply and _can_be_sent(reply[key])
    }
    return {
        "payload": [],
        "user_expressions": {},
        **keep,
        "status": "ok",
        "minidist": {"kind": "ok", "ranks": states},
    }


MAX_DEPTH = 50  # of nested lists and objects in a reply; the reader's limit may be lower than ours


def _can_be_sent(value: Any) -> bool:
    """Whether a part of a reply can be sent: no lone surrogates, no nan, not nested too deeply."""
    if not _is_shallow(value, MAX_DEPTH):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _is_shallow(value: Any, left: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return left > 0 and all(_is_shallow(part, left - 1) for part in parts)


def error(kind: str, ename: str, text: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Content for a cell that failed: `kind` is error, hang, deadline or rank_lost."""
    return {
        "status": "error",
        "ename": ename,
        "evalue": text,
        "traceback": [f"\x1b[31m{ename}\x1b[0m: {text}"],
        "payload": [],
        "user_expressions": {},
        "minidist": {"kind": kind, "ranks": states},
    }


def states_at_end(replies: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """How each rank ended, from the ranks' own replies."""
    return [
        {
            "rank": rank,
            "status": "ok" if reply.get("status") == "ok" else "error",
            "text": "finished the cell"
            if reply.get("status") == "ok"
            else printable(f"{reply.get('ename')}: {reply.get('evalue')}"[:300]),
        }
        for rank, reply in sorted(replies.items())
    ]
