"""Whether a parallel module can take the place of another: what it would lose is refused by name.

>>> check_layer("Split", nn.Linear(2, 2), nn.Linear)
>>> check_layer("Split", nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear)
Traceback (most recent call last):
    ...
ValueError: Split: the ParametrizedLinear has a parametrization of weight, which would be lost...
>>> embedding_options(nn.Embedding(4, 2, padding_idx=0, max_norm=1.0))
{'padding_idx': 0, 'max_norm': 1.0}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from minidist.unsupported import Unsupported

LOST = Unsupported(
    "layers of minidist.parallel.tensor and .context",
    "layers with additions of their own (hooks, parametrizations, a replaced forward)",
    instead="make the model parallel first, then add to it",
)
OPTIONS = Unsupported(
    "VocabParallelEmbedding, ParallelGPT, ContextParallelGPT, parallelize_gpt_native",
    "options of an embedding that need its whole table or all positions",
    instead="leave the option at its default, or use data parallelism, which keeps the embedding",
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_layer(who: str, full: Any, kind: type[nn.Module]) -> None:
    """Raise ValueError unless `full` is a layer of torch's `kind` that does nothing else."""
    name = type(full).__name__
    if not isinstance(full, kind):
        raise ValueError(f"{who}: expected an nn.{kind.__name__}, got {name}")
    if type(full).forward is not kind.forward:
        raise LOST.error(
            f"{name} has a forward of its own, which would be lost; expected that of "
            f"nn.{kind.__name__}",
            where=who,
        )
    _check_additions(who, full)


def check_parts(who: str, full: Any, parts: Sequence[str]) -> None:
    """Raise ValueError unless the module `full` consists of `parts` and of nothing else."""
    if not isinstance(full, nn.Module):
        return
    name = type(full).__name__
    if missing := [part for part in parts if not hasattr(full, part)]:
        raise ValueError(f"{who}: {name} has no {', '.join(missing)}; expected {', '.join(parts)}")
    own = [*full._parameters, *full._buffers, *full._modules]
    if others := [part for part in own if part not in parts and getattr(full, part) is not None]:
        raise ValueError(
            f"{who}: {name} also has {', '.join(others)}, which would be lost; expected only "
            f"{', '.join(parts)}"
        )
    _check_additions(who, full)


def _check_additions(who: str, full: nn.Module) -> None:
    lost = [name.strip("_") for name in _HOOKS if getattr(full, name)]
    lost += [
        f"a hook on {name}"
        for name, parameter in full.named_parameters(recurse=False)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if is_parametrized(full):
        lost.append(f"a parametrization of {', '.join(full.parametrizations)}")  # type: ignore[arg-type]
    if "forward" in vars(full):
        lost.append("a replaced forward (as `recompute` makes it)")
    if lost:
        raise LOST.error(
            f"the {type(full).__name__} has {' and '.join(lost)}, which would be lost", where=who
        )


def embedding_options(embedding: nn.Embedding) -> dict[str, Any]:
    """The options of an embedding that are not at their default."""
    defaults = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    return {
        name: getattr(embedding, name)
        for name, default in defaults.items()
        if getattr(embedding, name) != default
    }


def refuse_options(who: str, embedding: nn.Embedding, names: Iterable[str], why: str) -> None:
    """Raise ValueError if one of these options is set."""
    wrong = [f"{n}={v!r}" for n, v in embedding_options(embedding).items() if n in names]
    if wrong:
        raise OPTIONS.error(f"cannot keep {', '.join(wrong)}: {why}", where=who)


def shared_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, such as a tied weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]
