"""NCCL's environment variables that are set here: what each does, and which look dangerous.

The first rule is: do not set them. NCCL detects the topology and chooses by a cost model. An
old variable that was set for a different machine is a common reason for slow training.

>>> for row in explain({"NCCL_PROTO": "LL128", "NCCL_DEBUG": "INFO", "PATH": "/bin"}):
...     print(row.name, row.value, "|", row.what)
NCCL_DEBUG INFO | how much NCCL writes to stdout: VERSION, WARN, INFO, TRACE
NCCL_PROTO LL128 | protocols that NCCL may use: LL, LL128, Simple; ^ excludes
>>> print(find_dangers({"NCCL_PROTO": "LL128"})[0].text)
forcing LL128 where the hardware does not support it corrupts data; exclude with ^ instead

The table of all variables is `minidist.profile.nccl_settings.SETTINGS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from minidist.profile.nccl_settings import BY_NAME

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A variable that is set: its value, meaning, default, and warnings."""

    name: str
    value: str
    what: str
    default: str
    when: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Danger:
    """A value, or a combination of values, that costs speed, data or the explanation of a hang."""

    names: tuple[str, ...]
    text: str


def explain(
    env: Mapping[str, str] | None = None, *, interfaces: Collection[str] | None = None
) -> list[SettingRow]:
    """Rows for the variables that are set, by name: those in the table, and those that are not in
    the table but begin with NCCL_, TORCH_NCCL_ or TORCH_FR_.

    Args:
        env: None means this process's environment.
        interfaces: names of this machine's network interfaces, to check NCCL_SOCKET_IFNAME.
    """
    env = os.environ if env is None else env
    dangers = find_dangers(env, interfaces=interfaces)
    rows = []
    for name in sorted(env):
        setting = BY_NAME.get(name)
        if setting is None and not name.startswith(_PREFIXES):
            continue
        notes = [danger.text for danger in dangers if name in danger.names]
        if setting is not None and name != setting.name:
            notes.insert(0, f"an old name of {setting.name}")
        rows.append(
            SettingRow(
                name=name,
                value=env[name],
                what=setting.what if setting else "not in this table: misspelt, new, or rare",
                default=setting.default if setting else "",
                when=setting.when if setting else "",
                warnings=tuple(notes),
            )
        )
    return rows


def find_dangers(
    env: Mapping[str, str], *, interfaces: Collection[str] | None = None
) -> list[Danger]:
    """Values and combinations of values that may be a mistake."""

    def get(name: str) -> str:
        for each in (name, *BY_NAME[name].old_names):
            if each in env:
                return env[each].strip()
        return ""

    def on(name: str) -> bool:
        return get(name).lower() in ("1", "true", "yes", "y", "t", "on")

    def off(name: str) -> bool:
        return get(name).lower() in ("0", "false", "no", "n", "f", "off")

    found: list[Danger] = []
    for names, applies, text in _RULES:
        if applies(get, on, off):
            old = [old for name in names for old in BY_NAME[name].old_names]
            found.append(Danger(names=(*names, *old), text=text))
    missing = _missing_interfaces(get("NCCL_SOCKET_IFNAME"), interfaces)
    if missing:
        found.append(
            Danger(
                names=("NCCL_SOCKET_IFNAME",),
                text=f"no interface here is called {', '.join(missing)}: NCCL will not start",
            )
        )
    return found


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def _forces(value: str, name: str) -> bool:
    """Whether a list such as "Ring,Tree" or "allreduce:tree" contains `name` and no ^ (exclude)."""
    return bool(value) and "^" not in value and name.lower() in value.lower()


def _missing_interfaces(value: str, interfaces: Collection[str] | None) -> list[str]:
    if not value or value.startswith("^") or interfaces is None:
        return []
    names = [name for name in value.lstrip("=").split(",") if name]

    def matches(name: str) -> bool:
        return any(i == name if value.startswith("=") else i.startswith(name) for i in interfaces)

    return [] if any(map(matches, names)) else names


Get = Callable[[str], str]
Is = Callable[[str], bool]

# (the variables, when the rule applies, the warning)
_RULES: tuple[tuple[tuple[str, ...], Callable[[Get, Is, Is], bool], str], ...] = (
    (
        ("NCCL_PROTO",),
        lambda get, on, off: _forces(get("NCCL_PROTO"), "LL128"),
        "forcing LL128 where the hardware does not support it corrupts data; exclude with ^ "
        "instead",
    ),
    (
        ("NCCL_ALGO",),
        lambda get, on, off: bool(get("NCCL_ALGO")) and "^" not in get("NCCL_ALGO"),
        "one algorithm is best for small or for large buffers, not for both; what is not named is "
        "forbidden",
    ),
    (
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
        lambda get, on, off: on("NCCL_P2P_DISABLE") and on("NCCL_SHM_DISABLE"),
        "without peer access and shared memory, GPUs of one node talk over the network",
    ),
    (
        ("NCCL_P2P_DISABLE",),
        lambda get, on, off: on("NCCL_P2P_DISABLE"),
        "no NVLink and no PCIe peer access: gradients go through host memory",
    ),
    (
        ("NCCL_IB_DISABLE",),
        lambda get, on, off: on("NCCL_IB_DISABLE"),
        "nodes talk over TCP, with a fraction of the bandwidth",
    ),
    (
        ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
        lambda get, on, off: (
            _number(get("NCCL_SOCKET_NTHREADS"), 1) * _number(get("NCCL_NSOCKS_PERTHREAD"), 1) > 64
        ),
        "threads x sockets must be at most 64",
    ),
    (
        ("NCCL_SOCKET_IFNAME",),
        lambda get, on, off: get("NCCL_SOCKET_IFNAME").lstrip("=") == "lo",
        "lo reaches this machine only",
    ),
    (
        ("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG"),
        lambda get, on, off: (
            bool(get("NCCL_DEBUG_SUBSYS")) and get("NCCL_DEBUG").upper() not in ("INFO", "TRACE")
        ),
        "NCCL_DEBUG_SUBSYS does nothing without NCCL_DEBUG=INFO",
    ),
    (
        ("NCCL_DEBUG_FILE",),
        lambda get, on, off: bool(get("NCCL_DEBUG_FILE")) and "%p" not in get("NCCL_DEBUG_FILE"),
        "without %p (and %h) all ranks write over one file",
    ),
    (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
        lambda get, on, off: (
            off("TORCH_NCCL_ASYNC_ERROR_HANDLING") and not on("TORCH_NCCL_BLOCKING_WAIT")
        ),
        "a lost rank leaves the others hanging for ever",
    ),
    (
        ("TORCH_NCCL_BLOCKING_WAIT",),
        lambda get, on, off: on("TORCH_NCCL_BLOCKING_WAIT"),
        "the host waits for every collective: no overlap with computation",
    ),
    (
        ("TORCH_FR_BUFFER_SIZE",),
        lambda get, on, off: get("TORCH_FR_BUFFER_SIZE") == "0",
        "the flight recorder is off: a hang will leave nothing to read",
    ),
    (
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"),
        lambda get, on, off: (
            off("TORCH_NCCL_ENABLE_MONITORING") and not off("TORCH_NCCL_DUMP_ON_TIMEOUT")
        ),
        "the thread that dumps the flight recorder is the monitoring thread, which is off",
    ),
    (
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
        lambda get, on, off: 0 < _number(get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"), 480) < 60,
        "a process that is busy for a minute (a checkpoint, say) is ended",
    ),
    (
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda get, on, off: get("TORCH_DISTRIBUTED_DEBUG").upper() == "DETAIL",
        "every collective is checked against all ranks first: slow; and DDP's constructor has "
        "crashed with it on gloo (torch 2.13)",
    ),
    (
        ("CUDA_LAUNCH_BLOCKING",),
        lambda get, on, off: on("CUDA_LAUNCH_BLOCKING"),
        "nothing overlaps: times mean nothing",
    ),
)
