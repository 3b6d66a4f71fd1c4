"""Our versions of functions that a student writes in one task and calls in a later one.

A later task is judged with these if the student's own are wrong, which costs points once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.device import all_gather_single, reduce_scatter_single


def _summed(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def copy_in(x: torch.Tensor) -> torch.Tensor:
    """f, as a hook in place of an autograd function."""
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(_summed)
    return y


def sum_out(x: torch.Tensor) -> torch.Tensor:
    """g: for autograd, the other ranks' summands are a constant."""
    return x + (_summed(x) - x.detach())


def _tokens_of_all(part: torch.Tensor) -> torch.Tensor:
    n, first = dist.get_world_size(), part.detach().contiguous()
    whole = first.new_empty(n * first.shape[0], *first.shape[1:])
    all_gather_single(whole, first)
    return torch.cat(whole.chunk(n), dim=1)


def _tokens_of_sum(whole: torch.Tensor) -> torch.Tensor:
    pieces = torch.cat(whole.detach().chunk(dist.get_world_size(), dim=1))
    part = torch.empty_like(pieces[: whole.shape[0]])
    reduce_scatter_single(part, pieces)
    return part


class _Conjugate(torch.autograd.Function):
    """One function forward, a different one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def gather_in(x: torch.Tensor) -> torch.Tensor:
    """All-gather of tokens; backward, a reduce-scatter."""
    return _Conjugate.apply(x, _tokens_of_all, _tokens_of_sum)  # type: ignore[return-value]


def scatter_out(x: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter of tokens; backward, an all-gather."""
    return _Conjugate.apply(x, _tokens_of_sum, _tokens_of_all)  # type: ignore[return-value]


def my_slice(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's slice of a dimension."""
    size, rest = divmod(tensor.shape[dim], dist.get_world_size())
    if rest:
        raise ValueError(f"{tensor.shape[dim]} does not divide by {dist.get_world_size()}")
    return tensor.narrow(dim, size * dist.get_rank(), size)


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter with a copy of the numbers."""
    return nn.Parameter(torch.empty_like(tensor).copy_(tensor.detach()))


class ColumnParallelLinear(nn.Module):
    """Some output features."""

    def __init__(
        self, full: nn.Linear, gather_output: bool = False, enter: Callable = copy_in
    ) -> None:
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 0))
        self.register_parameter("bias", None)
        if full.bias is not None:
            self.bias = parameter(my_slice(full.bias, 0))
        self.enter, self.gathers = enter, gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features, or all."""
        y, n, rank = self.enter(x) @ self.weight.mT, dist.get_world_size(), dist.get_rank()
        y = y if self.bias is None else y + self.bias
        size = y.shape[-1]
        return sum_out(F.pad(y, (rank * size, (n - 1 - rank) * size))) if self.gathers else y


class RowParallelLinear(nn.Module):
    """Some input features."""

    def __init__(
        self, full: nn.Linear, input_is_parallel: bool = True, leave: Callable = sum_out
    ) -> None:
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 1))
        self.bias = None if full.bias is None else parameter(full.bias)
        self.leave, self.is_cut = leave, input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All output features."""
        y = self.leave((x if self.is_cut else my_slice(copy_in(x), -1)) @ self.weight.mT)
        return y if self.bias is None else y + self.bias


class ParallelMLP(nn.Module):
    """Some hidden features."""

    def __init__(
        self,
        up: nn.Linear,
        down: nn.Linear,
        p: float = 0.0,
        stream: Any = None,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(up, enter=enter)
        self.down = RowParallelLinear(down, leave=leave)
        self.p, self.stream = p, stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout draws from the rank's stream."""
        drops = self.training and self.p > 0
        with self.stream.fork() if drops else contextlib.nullcontext():
            hidden = F.dropout(F.gelu(self.up(x)), self.p, drops)
        return self.down(hidden)


class ParallelAttention(nn.Module):
    """Some heads."""

    def __init__(
        self,
        qkv: nn.Linear,
        out: nn.Linear,
        num_heads: int,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        n = dist.get_world_size()
        if num_heads % n:
            raise ValueError(f"{num_heads} heads do not divide by {n}")
        # [3, ranks, rows] with ranks first: then the r-th slice has a part of each of the three.
        rows = torch.arange(qkv.weight.shape[0]).view(3, n, -1).transpose(0, 1).flatten()
        sorted_qkv = nn.Linear(qkv.weight.shape[1], len(rows), qkv.bias is not None)
        sorted_qkv.weight = parameter(qkv.weight[rows])
        if qkv.bias is not None:
            sorted_qkv.bias = parameter(qkv.bias[rows])
        self.qkv = ColumnParallelLinear(sorted_qkv, enter=enter)
        self.out, self.heads = RowParallelLinear(out, leave=leave), num_heads // n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal, with scores written out."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ParallelBlock(nn.Module):
    """Norms on all ranks, the rest in parts."""

    def __init__(
        self,
        full: Any,
        p: float = 0.0,
        stream: Any = None,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = copy.deepcopy(full.norm1), copy.deepcopy(full.norm2)
        self.attention = ParallelAttention(full.qkv, full.out, full.num_heads, enter, leave)
        self.mlp = ParallelMLP(full.up, full.down, p, stream, enter, leave)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two residual sums."""
        for norm, part in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            x = x + self.dropout(part(norm(x)))
        return x


class RankStream:
    """A stream of its own for each rank."""

    def __init__(self, seed: int) -> None:
        self.seed, self.state = seed, None

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch draws from the stream."""
        with torch.random.fork_rng():
            if self.state is None:
                torch.manual_seed(7919 * self.seed + dist.get_rank())
            else:
                _set_states(self.state)
            try:
                yield
            finally:
                self.state = _states()


def _states() -> list[torch.Tensor]:
    gpus = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpus]


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def owned(ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers on this rank, and which rows are here."""
    mine = ids // rows == dist.get_rank()
    return torch.where(mine, ids % rows, 0), mine
