"""Criteria for task 2 of lab 5: the network interface that gloo and NCCL have to use."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import item_of, naming, plain
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

NO_WAY = "ValueError"
CASES = (
    *("plain", "own", "narrow first", "wide first", "odd first", "odd last", "ipv6"),
    *("ipv6 peer", "second address", "loopback", "bridge", "own, narrower", "default", "nowhere"),
)


def draw_interface(draw: Draw) -> list[Values]:
    """Per rank fourteen situations: the interfaces of one node, and the address of a peer."""
    return [_draw_tables(draw.private(rank), CASES) for rank in range(draw.world_size)]


def draw_nccl(draw: Draw) -> list[Values]:
    """Two plain situations; the right interface's name is a prefix of a different name."""
    return [_draw_tables(draw.private(r), ("plain", "plain")) for r in range(draw.world_size)]


def _draw_tables(rng: np.random.Generator, kinds: tuple[str, ...]) -> Values:
    tables = []
    for kind in kinds:
        a, b, c, d, e = (int(n) for n in rng.integers(2, 250, 5))
        fast = {"plain": "eth1", "own": "ens3", "ipv6": "eno2"}.get(kind, "ib1")
        table = [
            ("lo", ["127.0.0.1/8"]),
            ("docker0", ["172.17.0.1/16"]),
            ("eth0" if kind == "plain" else "eno1", [f"192.168.{c}.{d}/24"]),
            (fast, [f"10.{a}.{b}.{e}/16"]),
        ]
        peer = f"10.{a}.{(b + 1) % 250}.{(e + 7) % 250 + 1}"
        if kind == "plain":
            table.append(("eth10", [f"10.{(a + 1) % 250}.{b}.{e}/16"]))
        if kind == "own":
            peer = f"10.{a}.{b}.{e}"
        if kind in ("narrow first", "wide first"):
            wide = ("tun0" if kind == "narrow first" else "br0", [f"10.{(a + 1) % 250}.{c}.{d}/8"])
            table.append(wide)
        if kind in ("odd first", "odd last"):  # two /25 networks that begin with the same numbers
            there, elsewhere = (e % 100 + 1, e % 100 + 129)
            table[-1] = (fast, [f"10.{a}.{b}.{there}/25"])
            beside = "eth2" if kind == "odd first" else "wlan0"
            table.append((beside, [f"10.{a}.{b}.{elsewhere}/25"]))
            peer = f"10.{a}.{b}.{there + 7}"
        if kind == "ipv6":
            table[-1] = (fast, [f"fe80::{e:x}/64", *table[-1][1]])
        if kind == "ipv6 peer":
            table[-1] = (fast, [*table[-1][1], f"fd00:{a:x}:{b:x}::{e:x}/64"])
            table[2] = (table[2][0], [*table[2][1], f"fd00:{a:x}:{b + 1:x}::{e:x}/64"])
            # The same address may be written in several ways.
            peer = ipaddress.ip_address(f"fd00:{a:x}:{b:x}::{e + 1:x}").exploded
        if kind == "second address":  # one interface has two networks with the peer, bond0 a third
            table[-1] = (fast, [f"10.{a}.{b}.{e}/8", f"10.{a}.{b}.{e}/20"])
            table.append(("bond0", [f"10.{a}.{b}.{e % 200 + 3}/16"]))
            peer = f"10.{a}.{b}.{e % 200 + 40}"
        if kind == "own, narrower":  # the peer is this node, and bond0's network is narrower
            peer = f"10.{a}.{b}.{e}"
            table.append(("bond0", [f"10.{a}.{b}.{e % 200 + 3}/24"]))
        if kind == "default":  # a network that holds every address
            table.append(("tun0", [f"10.{(a + 1) % 250}.{c}.{d}/0"]))
            peer = f"11.{a}.{b}.{e}"
        if kind == "loopback":  # two nodes on one machine
            peer = f"127.0.{c}.{d}"
        if kind == "bridge":  # two nodes in containers of one machine
            peer = f"172.17.{c}.{d}"
        if kind == "nowhere":
            peer = f"11.{a}.{b}.{e}"
        order = list(rng.permutation(len(table)))
        if kind.endswith("first"):  # code that takes the first, or the last, is wrong once
            order.sort(key=lambda i: i == len(table) - 1)
        elif kind in ("odd last", "plain"):
            order.sort(key=lambda i: i != len(table) - 1)
        if kind == "wide first":
            order.reverse()
        tables.append({"kind": kind, "peer": peer, "interfaces": [table[i] for i in order]})
    return {"tables": tables}


def observe_interface(network_env: Any, inputs: Values, context: Context) -> Values:
    """Per situation the variables that the function returns, or that it raised ValueError."""
    said: list[Any] = []
    for table in inputs["tables"]:
        interfaces = {name: list(addresses) for name, addresses in table["interfaces"]}
        leads_there = table["kind"] != "nowhere"
        more = "; one of these interfaces leads there" if leads_there else ""
        with naming(f"network_env({interfaces}, {table['peer']!r}){more}"):
            try:
                env = network_env(interfaces, table["peer"])
            except ValueError:
                if leads_there:
                    raise
                said.append(NO_WAY)
                continue
        if not isinstance(env, dict):
            raise TypeError(f"network_env: expected a dict, got {type(env).__name__}")
        said.append({str(key): str(value) for key, value in env.items()})
    return {"said": said}


def right_interface(table: Values) -> str | None:
    """The interface whose network holds the peer; if several do, that of the narrowest network."""
    peer = ipaddress.ip_address(table["peer"])
    best: tuple[int, str] | None = None
    for name, addresses in table["interfaces"]:
        for text in addresses:
            network = ipaddress.ip_interface(text).network
            if peer.version == network.version and peer in network:
                best = max(best or (-1, ""), (network.prefixlen, name))
    return best[1] if best else None


_WHY = {
    "own": " The peer may be this node itself: node 0 looks for its own address.",
    "narrow first": " Two networks hold that address: the narrower one (longer prefix) is meant.",
    "odd first": " A prefix need not end at a dot: with /25 the last number decides, too.",
}
_WHY["second address"] = " An interface may have several addresses: look at each of them."
_WHY["loopback"] = " Two nodes on one machine meet on the loopback interface."
_WHY["own, narrower"] = " The narrower network is meant, also where the peer is this very node."
_WHY["default"] = " A network with the prefix 0 holds every address."
_WHY |= {"wide first": _WHY["narrow first"], "odd last": _WHY["odd first"]}


def judge_interface(case: Case) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME is the interface that leads to the peer."""
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, table in enumerate(case.inputs[rank]["tables"]):
            said, right = item_of(answer.get("said"), number), right_interface(table)
            where = f"{dict(table['interfaces'])}, peer {table['peer']}"
            if right is None:
                if said != NO_WAY:
                    yield Finding(
                        f"{where}: no interface leads there, so a ValueError was expected, got "
                        f"{said}. A wrong guess hangs later, with no message.",
                        rank,
                    )
                continue
            got = said.get("GLOO_SOCKET_IFNAME") if isinstance(said, dict) else None
            if got != right:
                yield Finding(
                    f"{where}: GLOO_SOCKET_IFNAME expected {right}, got {got}."
                    f"{_WHY.get(table['kind'], '')}",
                    rank,
                )
                break


def judge_nccl(case: Case) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME admits the interface that gloo was given, and no other.

    Any value that does so is right: the name after =, or all others after ^=.
    """
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, table in enumerate(case.inputs[rank]["tables"]):
            said = item_of(answer.get("said"), number)
            said = said if isinstance(said, dict) else {}
            names = [name for name, _ in table["interfaces"]]
            wanted = {said.get("GLOO_SOCKET_IFNAME", right_interface(table))}
            value = said.get("NCCL_SOCKET_IFNAME")
            admitted = _admitted(value, names)
            if admitted != wanted:
                yield Finding(
                    f"interfaces {names}: NCCL_SOCKET_IFNAME={value} admits "
                    f"{sorted(admitted) or 'none'}, expected only {sorted(map(str, wanted))}. NCCL "
                    "takes the value for the beginning of a name; =NAME means that name alone.",
                    rank,
                )
                break


def _admitted(value: Any, names: list[str]) -> set[str]:
    """The interfaces that NCCL would use for this value of its variable."""
    if not isinstance(value, str) or not value:
        return set()
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    parts = [part for part in value.lstrip("^").lstrip("=").split(",") if part]
    matched = {
        n for n in names for part in parts if n == part or (not exact and n.startswith(part))
    }
    return set(names) - matched if exclude else matched
