"""Clusters as data. Bandwidths are bytes per second in one direction, latencies seconds.

Figures: NVIDIA data sheets, as gathered in github.com/stas00/ml-engineering (A100 SXM 80 GB:
312 TFLOP/s bf16, 2.0 TB/s; H100 SXM: 989 TFLOP/s bf16, 3.35 TB/s, NVLink 450 GB/s each way).
Latencies per hop: constants of NCCL's tuning model (src/graph/tuning.cc, ring, Simple protocol:
NVLink 3.4 us, PCIe 5.7 us, network 9.6 us).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a wire: a message of B bytes takes latency_s + B / bandwidth."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link needs bandwidth > 0 and latency >= 0, got {self}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. Rank r is device r % devices_per_node of node r // devices_per_node.

    Every device has a port to the links inside its node; every node has one port to other nodes.
    """

    name: str
    nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    peak_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    launch_s: float = 0.0  # time to start one operation of the device, added to its roofline

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise ValueError(
                f"cluster {self.name!r}: needs at least one node with one device, got "
                f"{self.nodes} x {self.devices_per_node}"
            )

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def link_between(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link that a group of ranks has to use."""
        if len({self.node_of(rank) for rank in ranks}) == 1:
            return self.intra_node
        return Link(
            bandwidth_bytes_per_s=min(
                self.intra_node.bandwidth_bytes_per_s, self.inter_node.bandwidth_bytes_per_s
            ),
            latency_s=max(self.intra_node.latency_s, self.inter_node.latency_s),
        )

    def roofline_seconds(self, flops: float, num_bytes: float) -> float:
        """Time of one operation: bound by arithmetic or by memory, plus its launch."""
        return self.launch_s + max(
            flops / self.peak_flops_per_s, num_bytes / self.memory_bandwidth_bytes_per_s
        )


_NETWORK_100_GBIT = Link(bandwidth_bytes_per_s=12.5e9, latency_s=9.6e-6)


def laptop(num_devices: int = 2) -> Cluster:
    """Processes of one laptop over gloo: rough figures, for orders of magnitude."""
    link = Link(bandwidth_bytes_per_s=1.5e9, latency_s=50e-6)
    return Cluster(
        name=f"laptop x {num_devices}",
        nodes=1,
        devices_per_node=num_devices,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=100e9,
        memory_bandwidth_bytes_per_s=20e9,
    )


def pcie_a100(num_devices: int = 2) -> Cluster:
    """A100 GPUs that communicate over PCIe 4.0 x16 (32 GB/s each way)."""
    return Cluster(
        name=f"{num_devices} x A100, PCIe",
        nodes=1,
        devices_per_node=num_devices,
        intra_node=Link(bandwidth_bytes_per_s=32e9, latency_s=5.7e-6),
        inter_node=_NETWORK_100_GBIT,
        peak_flops_per_s=312e12,
        memory_bandwidth_bytes_per_s=2.0e12,
    )


def dgx_h100(nodes: int = 1) -> Cluster:
    """DGX H100: 8 GPUs on NVLink (450 GB/s each way), 400 Gbit/s per GPU between nodes."""
    return Cluster(
        name="DGX H100" if nodes == 1 else f"{nodes} x DGX H100",
        nodes=nodes,
        devices_per_node=8,
        intra_node=Link(bandwidth_bytes_per_s=450e9, latency_s=3.4e-6),
        inter_node=Link(bandwidth_bytes_per_s=8 * 50e9, latency_s=9.6e-6),
        peak_flops_per_s=989e12,
        memory_bandwidth_bytes_per_s=3.35e12,
    )
