"""An environment in which each rank has a machine for itself: local numbers are not global ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from autograder.criteria.criterion import Context, Values


def on_own_node(observe: Callable[[Any, Values, Context], Values]) -> Any:
    """`observe`, with the variables that torchrun sets if each rank runs on another machine.

    Code that takes LOCAL_RANK for RANK, or LOCAL_WORLD_SIZE for WORLD_SIZE, is wrong there.
    """

    @functools.wraps(observe)
    def alone(subject: Any, inputs: Values, context: Context) -> Values:
        rank, count = str(context.rank), str(context.world_size)
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        with mock.patch.dict(os.environ, local | {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": count}):
            return observe(subject, inputs, context)

    return alone
