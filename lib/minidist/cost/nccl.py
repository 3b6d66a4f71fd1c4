"""NCCL's own prediction of a collective's time, with which NCCL chooses algorithm and protocol.

For every algorithm (ring, tree) and protocol, NCCL adds a base latency, a latency per hop and
bytes / bandwidth. Then NCCL takes the fastest combination. The protocols:

- **LL** sends 4 bytes of data with 4 bytes of flag: lowest latency, half of the bandwidth (old
  versions of the model count a quarter);
- **LL128** sends 120 of 128 bytes as data: low latency, 92 % of the bandwidth, where NVLink allows;
- **Simple** sends large chunks with a fence: highest latency, all of the bandwidth.

The constants (NVIDIA/nccl, src/graph/tuning.cc, microseconds) change with the version: `VERSIONS`
has those of 2.7.5, with which many published measurements were made, and of 2.28.7. The old version
charges `Simple` on trees 28 us per hop on NVLink (with the time of a 256 kB chunk in it) and
nothing as base, so it never uses `Simple` for small buffers on trees; the new one charges 4 us. Not
in here: NVLS and CollNet, corrections by size, limits per channel.

Example: 8 GPUs on NVLink switch from LL to LL128 to Simple as the buffer grows.

>>> [choose(num_bytes=b, gpus_per_node=8, num_nodes=1, bus_bytes_per_s=235e9).protocol
...  for b in (2**10, 2**22, 2**30)]
['LL', 'LL128', 'Simple']
>>> [VERSIONS[v].hop_latency_us["NET"]["ring"][-1] for v in ("2.7.5", "2.28.7")]
[9.6, 14.0]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("ring", "tree")
_PerProtocol = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one version of NCCL, one figure per protocol.

    Attributes:
        base_latency_us: by algorithm, in microseconds.
        hop_latency_us: by link (NVLINK, PCI, NET) and algorithm, in microseconds.
        bandwidth_share: of the bus bandwidth.
    """

    version: str
    base_latency_us: dict[str, _PerProtocol] = field(hash=False)
    hop_latency_us: dict[str, dict[str, _PerProtocol]] = field(hash=False)
    bandwidth_share: _PerProtocol


VERSIONS = {
    constants.version: constants
    for constants in (
        Constants(
            version="2.7.5",
            base_latency_us={"tree": (4.4, 4.4, 0.0), "ring": (3.6, 10.0, 8.4)},
            hop_latency_us={
                "NVLINK": {"tree": (0.52, 1.2, 28.0), "ring": (0.47, 1.9, 3.4)},
                "PCI": {"tree": (1.0, 1.9, 28.0), "ring": (1.0, 2.5, 5.7)},
                "NET": {"tree": (5.0, 8.5, 50.0), "ring": (2.7, 4.0, 9.6)},
            },
            bandwidth_share=(1 / 4, 0.92, 1.0),
        ),
        Constants(
            version="2.28.7",
            base_latency_us={"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)},
            hop_latency_us={
                "NVLINK": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
                "PCI": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
                "NET": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
            },
            bandwidth_share=(1 / 2, 0.92, 1.0),
        ),
    )
}
TODAY = "2.28.7"


def constants_of(version: str) -> Constants:
    """The constants of a version.

    Raises:
        ValueError: the constants of this version are not here.
    """
    if version not in VERSIONS:
        raise ValueError(f"nccl: constants are known of {', '.join(VERSIONS)}, got {version!r}")
    return VERSIONS[version]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One algorithm and protocol with its predicted seconds."""

    algorithm: str
    protocol: str
    seconds: float


def latency_seconds(
    *,
    algorithm: str,
    protocol: str,
    gpus_per_node: int,
    num_nodes: int,
    kind: str = "all_reduce",
    intra: str = "NVLINK",
    version: str = TODAY,
) -> float:
    """The part of the predicted time that does not depend on the number of bytes.

    ring: base + (steps - network steps) * intra + network steps * net, where an all-reduce has
    2(n-1) steps, 2(nodes-1) of them over the network (half of both for reduce-scatter and
    all-gather). tree (all-reduce only): base + 2((g-1) * intra + log2(nodes) * net), with g GPUs
    per node.
    """
    index = PROTOCOLS.index(protocol)
    constants = constants_of(version)
    hop = constants.hop_latency_us[intra][algorithm][index]
    net = constants.hop_latency_us["NET"][algorithm][index]
    base = constants.base_latency_us[algorithm][index]
    if algorithm == "tree":
        if kind != "all_reduce":
            raise ValueError(f"NCCL's trees do all_reduce only, not {kind!r}")
        levels = math.log2(num_nodes)
        return 1e-6 * (base + 2 * ((gpus_per_node - 1) * hop + levels * net))
    rounds = 2 if kind == "all_reduce" else 1
    steps = rounds * (gpus_per_node * num_nodes - 1)
    net_steps = rounds * (num_nodes - 1) if num_nodes > 1 else 0
    return 1e-6 * (base + (steps - net_steps) * hop + net_steps * net)


def predict(
    *,
    num_bytes: float,
    gpus_per_node: int,
    num_nodes: int,
    bus_bytes_per_s: float,
    algorithm: str,
    protocol: str,
    kind: str = "all_reduce",
    intra: str = "NVLINK",
    version: str = TODAY,
) -> float:
    """Seconds of a collective that NCCL predicts: latency + bytes / algorithm bandwidth.

    Args:
        bus_bytes_per_s: bus bandwidth of the ring or tree that NCCL found, all channels together.
            The algorithm bandwidth is bus * n / steps for a ring and bus / 2 for a tree.
    """
    n = gpus_per_node * num_nodes
    if n == 1:
        return 0.0
    bus = bus_bytes_per_s * constants_of(version).bandwidth_share[PROTOCOLS.index(protocol)]
    steps = (2 if kind == "all_reduce" else 1) * (n - 1)
    bandwidth = bus * n / steps if algorithm == "ring" else bus / 2
    latency_s = latency_seconds(
        algorithm=algorithm,
        protocol=protocol,
        gpus_per_node=gpus_per_node,
        num_nodes=num_nodes,
        kind=kind,
        intra=intra,
        version=version,
    )
    return latency_s + num_bytes / bandwidth


def choose(
    *,
    num_bytes: float,
    gpus_per_node: int,
    num_nodes: int,
    bus_bytes_per_s: float,
    kind: str = "all_reduce",
    intra: str = "NVLINK",
    version: str = TODAY,
) -> Choice:
    """The algorithm and protocol with the shortest predicted time."""
    choices = [
        Choice(
            algorithm=algorithm,
            protocol=protocol,
            seconds=predict(
                num_bytes=num_bytes,
                gpus_per_node=gpus_per_node,
                num_nodes=num_nodes,
                bus_bytes_per_s=bus_bytes_per_s,
                algorithm=algorithm,
                protocol=protocol,
                kind=kind,
                intra=intra,
                version=version,
            ),
        )
        for algorithm in (ALGORITHMS if kind == "all_reduce" else ("ring",))
        for protocol in PROTOCOLS
    ]
    return min(choices, key=lambda choice: choice.seconds)
