"""GPUs, links and nodes as data, with the source of each figure.

This file avoids three common mistakes:

- **Dense or sparse.** Data sheets print tensor-core peaks for 2:4 sparsity first. Training is
  dense, so every peak in this file is the dense peak, which is half of the sparse peak.
- **One direction or both.** NVLink is sold by the sum of both directions ("900 GB/s"). In a ring
  each rank sends and receives at the same time, so the bandwidth of ONE direction (450 GB/s)
  decides the time. `Link.bandwidth_bytes_per_s` is always one direction;
  `bidirectional_bytes_per_s` is both.
- **Bits or bytes.** Networks are sold in bits: 400 Gbit/s is 50 GB/s. GB is 10^9 bytes, GiB 2^30.

Example: an A100 sends to its neighbour over NVLink 9.5 times as fast as over PCIe 4.0.

>>> round(NVLINK3.bandwidth_bytes_per_s / pcie(generation=4).bandwidth_bytes_per_s, 1)
9.5
>>> gbit_per_s(400) / 1e9
50.0

Sources: NVIDIA data sheets as collected in github.com/stas00/ml-engineering (chapters on
accelerators and networks); attainable fractions: the measurements in benchmarks/reference/;
latencies: NCCL's tuning model (src/graph/tuning.cc, ring, Simple protocol).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace

GB = 1e9
GIB = 2.0**30
TFLOP = 1e12

_SHEETS = "NVIDIA data sheet, via stas00/ml-engineering"


def gbit_per_s(gigabits: float) -> float:
    """Bytes per second of a link that is sold in Gbit/s: bytes = bits / 8."""
    return gigabits * 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator.

    Attributes:
        peak_flops_per_s: dense peak by dtype: "bf16" and "fp16" (tensor cores, fp32 accumulation),
            "tf32" (tensor cores), "fp32" (plain cores), "fp8". Only dtypes that the chip supports.
        memory_bytes: size of the device memory (a data sheet's GB is 10^9 bytes).
        memory_bandwidth_bytes_per_s: bandwidth of the device memory.
        matmul_efficiency: the share of peak that large matrix products of a training run reach,
            clocks and power included.
        power_w: the power limit with which the constants were measured.
        half_rows, half_head: number of rows of a product, and width of an attention head, at which
            a product reaches half of its speed.
        attention_efficiency: share of peak that FlashAttention reaches with a wide head. The whole
            square of scores counts as its FLOPs.
        memory_efficiency: share of the memory's bandwidth that kernels reach.
            The constants from matmul_efficiency to here are fitted, one set per generation, to the
            calibration rows in `minidist/plan/published`. A GPU without a run in these rows has
            the H100's set.
        source: where the figures come from.
    """

    name: str
    peak_flops_per_s: dict[str, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float = 0.7
    half_rows: float = 0.0
    half_head: float = 0.0
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    power_w: float = 0.0
    source: str = _SHEETS

    @property
    def attainable_memory_bandwidth(self) -> float:
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    def at_power(self, watts: float) -> GPU:
        """The same chip with a lower power limit, at which matrix products are slower.

        Tensor cores run at the power limit. Power is frequency times the square of the voltage. The
        voltage falls with the frequency, so power grows with the third power of the frequency, and
        the speed of products with the third root of the power.

        Raises:
            ValueError: the limit is not above 0 or is above the chip's, or the chip's is unknown.
        """
        if not 0 < watts <= self.power_w:
            raise ValueError(
                f"{self.name} at {watts:g} W: expected a power limit above 0 and at most "
                f"{self.power_w:g} W"
            )
        clock = (watts / self.power_w) ** (1 / 3)
        return replace(
            self,
            matmul_efficiency=self.matmul_efficiency * clock,
            attention_efficiency=self.attention_efficiency * clock,
            power_w=watts,
        )

    def peak(self, dtype: str = "bf16") -> float:
        """Dense peak in FLOP/s.

        Raises:
            ValueError: no peak is known for this dtype.
        """
        if dtype not in self.peak_flops_per_s:
            raise ValueError(
                f"{self.name} has no peak for {dtype!r}, only for {sorted(self.peak_flops_per_s)}"
            )
        return self.peak_flops_per_s[dtype]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a wire: a message of B bytes takes latency_s + B / bandwidth.

    Attributes:
        bandwidth_bytes_per_s: nominal, one direction.
        attainable_fraction: bus bandwidth of a ring all-reduce of a large buffer / nominal
            bandwidth.
        latency_s: of one hop, including software.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    attainable_fraction: float = 1.0
    source: str = _SHEETS

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link needs bandwidth > 0 and latency >= 0, got {self}")
        if not 0 < self.attainable_fraction <= 1:
            raise ValueError(f"attainable_fraction is in (0, 1], got {self.attainable_fraction}")

    @property
    def bidirectional_bytes_per_s(self) -> float:
        return 2 * self.bandwidth_bytes_per_s

    @functools.cached_property
    def attainable(self) -> Link:
        """The same link with the bandwidth that collectives reach in practice."""
        return Link(
            name=f"{self.name}, attainable",
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * self.attainable_fraction,
            latency_s=self.latency_s,
            source=self.source,
        )

    def times(self, count: float) -> Link:
        """`count` such links used side by side."""
        return Link(
            name=f"{count:g} x {self.name}",
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * count,
            latency_s=self.latency_s,
            attainable_fraction=self.attainable_fraction,
            source=self.source,
        )


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine: `intra_node` joins its GPUs; each GPU has a `network` port to other nodes.

    Attributes:
        host_link_bytes_per_s: one GPU's way to host memory, one direction, attainable.
        host_memory_bytes_per_s: one GPU's share of the host memory's bandwidth. Both matter only
            for an offloaded optimiser, and are round figures of a machine with 8 GPUs.
    """

    name: str
    gpu: GPU
    num_gpus: int
    intra_node: Link
    network: Link
    host_link_bytes_per_s: float = 25e9
    host_memory_bytes_per_s: float = 40e9

    def link_for(self, *, num_ranks: int, stride: int = 1) -> Link:
        """The link that limits a ring of `num_ranks` ranks that are `stride` ranks apart.

        Inside one node this is `intra_node`. Across nodes, a group with k ranks in every node uses
        k network ports at once (NCCL builds a ring per port), but at most the bandwidth of
        `intra_node`.

        >>> DGX_A100.link_for(num_ranks=8).name
        'NVLink 3'
        >>> DGX_A100.link_for(num_ranks=16, stride=8).name  # one rank in each of 16 nodes
        'InfiniBand HDR 200 Gbit/s'
        >>> DGX_A100.link_for(num_ranks=16).bandwidth_bytes_per_s / 1e9  # 8 ports per node
        200.0
        """
        if num_ranks * stride <= self.num_gpus:
            return self.intra_node
        per_node = max(1, min(num_ranks, self.num_gpus // stride))
        outside = self.network if per_node == 1 else self.network.times(per_node)
        if outside.bandwidth_bytes_per_s < self.intra_node.bandwidth_bytes_per_s:
            return outside
        return Link(
            name=f"{self.intra_node.name} (network not the limit)",
            bandwidth_bytes_per_s=self.intra_node.bandwidth_bytes_per_s,
            latency_s=outside.latency_s,
            attainable_fraction=self.intra_node.attainable_fraction,
            source=self.intra_node.source,
        )


# ------------------------------------------------------------------------------------------ GPUs

V100 = GPU(
    name="V100 SXM 32 GB",
    peak_flops_per_s={"fp16": 125e12, "fp32": 15.7e12},
    memory_bytes=32 * GB,
    memory_bandwidth_bytes_per_s=0.9e12,
)
A100_40GB = GPU(
    name="A100 SXM 40 GB",
    peak_flops_per_s={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    memory_bytes=40 * GB,
    memory_bandwidth_bytes_per_s=1.555e12,
    matmul_efficiency=0.8111,
    half_rows=451.2,
    half_head=24.96,
    attention_efficiency=0.7209,
    memory_efficiency=0.8298,
    power_w=400,
)
A100 = GPU(
    name="A100 SXM 80 GB",
    peak_flops_per_s={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    memory_bytes=80 * GB,
    memory_bandwidth_bytes_per_s=2.0e12,  # the data sheet says 2,039 GB/s
    matmul_efficiency=0.8111,
    half_rows=451.2,
    half_head=24.96,
    attention_efficiency=0.7209,
    memory_efficiency=0.8298,
    power_w=400,
)
H100 = GPU(
    name="H100 SXM 80 GB",
    peak_flops_per_s={
        "bf16": 989e12,
        "fp16": 989e12,
        "tf32": 494.5e12,
        "fp32": 67e12,
        "fp8": 1979e12,
    },
    memory_bytes=80 * GB,
    memory_bandwidth_bytes_per_s=3.35e12,
    matmul_efficiency=0.6535,
    half_rows=651.1,
    half_head=40.35,
    attention_efficiency=0.4332,
    memory_efficiency=0.8651,
    power_w=700,
)
# The calibration rows have no training run on the next chips, so these have the constants of the
# H100. stas00/ml-engineering has measured how fast the best matrix product is: on B200 1,745 of
# 2,250 TFLOP/s, on MI300X 758 of 1,307, on H100 794.5 of 989. The matmul_efficiency of B200 and
# MI300X is the H100's times the ratio of these shares.
H200 = replace(
    H100,
    name="H200 SXM 141 GB",
    memory_bytes=141 * GB,
    memory_bandwidth_bytes_per_s=4.8e12,
)
B200 = replace(
    H100,
    name="B200 SXM 180 GB",
    peak_flops_per_s={
        "bf16": 2250e12,
        "fp16": 2250e12,
        "tf32": 1125e12,
        "fp32": 80e12,
        "fp8": 4500e12,
    },
    memory_bytes=180 * GB,
    memory_bandwidth_bytes_per_s=8.0e12,
    matmul_efficiency=H100.matmul_efficiency * (1745 / 2250) / (794.5 / 989),
    power_w=1000,
)
MI300X = replace(
    H100,
    name="MI300X 192 GB",
    peak_flops_per_s={
        "bf16": 1307e12,
        "fp16": 1307e12,
        "tf32": 653.7e12,
        "fp32": 163.4e12,
        "fp8": 2615e12,
    },
    memory_bytes=192 * GB,
    memory_bandwidth_bytes_per_s=5.3e12,
    matmul_efficiency=H100.matmul_efficiency * (758 / 1307) / (794.5 / 989),
    power_w=750,
    source="AMD Instinct MI300X data sheet",
)
GPUS = {gpu.name: gpu for gpu in (V100, A100_40GB, A100, H100, H200, B200, MI300X)}


def find_gpu(name: str, memory_bytes: float) -> GPU | None:
    """The figures for a device with this name from CUDA; None if there are none.

    A board for a PCIe slot has the name of a chip, but not the speed of the SXM module with this
    chip, so it gets None.

    >>> find_gpu("NVIDIA A100-SXM4-40GB", 42e9).name
    'A100 SXM 40 GB'
    >>> find_gpu("NVIDIA GH200 480GB", 102e9), find_gpu("NVIDIA H100 PCIe", 85e9)
    (None, None)
    """
    if re.search(r"PCIe|NVL\b", name, re.IGNORECASE):
        return None
    found = [gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.name.split()[0]}\b", name)]
    # Two GPUs are called A100, with 40 GB and with 80 GB: the memory size decides.
    return min(found, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


# ----------------------------------------------------------------------------------------- links

_NVLINK_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 5.7e-6, 9.6e-6


def _nvlink(generation: int, num_links: int, gbytes_per_link: float, fraction: float) -> Link:
    return Link(
        name=f"NVLink {generation}",
        bandwidth_bytes_per_s=num_links * gbytes_per_link * 1e9,
        latency_s=_NVLINK_HOP_S,
        attainable_fraction=fraction,
        source=f"{num_links} links of {gbytes_per_link:g} GB/s each way ({_SHEETS})",
    )


NVLINK2 = _nvlink(2, 6, 25.0, 0.8)
NVLINK3 = _nvlink(3, 12, 25.0, 0.78)  # 234.9 of 300 GB/s measured, 8 x A100, 16 GiB
NVLINK4 = _nvlink(4, 18, 25.0, 0.82)  # 367.6 of 450 GB/s measured, 8 x H200, ring
NVLINK5 = _nvlink(5, 18, 50.0, 0.82)  # no ring measurement; the fraction of NVLink 4

# Seven links to the seven other GPUs, 64 GB/s each way; no ring measurement.
INFINITY_FABRIC = Link(
    name="Infinity Fabric",
    bandwidth_bytes_per_s=7 * 64e9,
    latency_s=_NVLINK_HOP_S,
    attainable_fraction=0.75,
    source="AMD Instinct MI300X data sheet",
)

# Transfers per second of one lane, in 10^9. In 3.0 to 5.0, 128 of 130 bits are data.
_PCIE_GT_PER_S = {3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def pcie(*, generation: int, num_lanes: int = 16) -> Link:
    """A PCIe slot, one direction.

    bandwidth = lanes * transfers per second / 8 bits, times 128/130 for the line code (3.0 to 5.0).

    >>> [round(pcie(generation=g).bandwidth_bytes_per_s / 1e9, 1) for g in (3, 4, 5)]
    [15.8, 31.5, 63.0]
    """
    if generation not in _PCIE_GT_PER_S:
        raise ValueError(f"PCIe generation {generation}: known are {sorted(_PCIE_GT_PER_S)}")
    code = 1.0 if generation >= 6 else 128 / 130
    return Link(
        name=f"PCIe {generation}.0 x{num_lanes}",
        bandwidth_bytes_per_s=num_lanes * _PCIE_GT_PER_S[generation] * 1e9 / 8 * code,
        latency_s=_PCIE_HOP_S,
        attainable_fraction=0.8,
        source="PCI-SIG: transfers per lane and line code",
    )


def network(*, gigabits_per_s: float, name: str, latency_s: float = _NETWORK_HOP_S) -> Link:
    """A network port, one direction, from its nominal speed in Gbit/s."""
    return Link(
        name=f"{name} {gigabits_per_s:g} Gbit/s",
        bandwidth_bytes_per_s=gbit_per_s(gigabits_per_s),
        latency_s=latency_s,
        attainable_fraction=0.92,  # 46 to 48 of 50 GB/s measured over one 400 Gbit/s port
    )


INFINIBAND_HDR = network(gigabits_per_s=200, name="InfiniBand HDR")
INFINIBAND_NDR = network(gigabits_per_s=400, name="InfiniBand NDR")
ETHERNET_10 = network(gigabits_per_s=10, name="Ethernet", latency_s=50e-6)
ETHERNET_25 = network(gigabits_per_s=25, name="Ethernet", latency_s=50e-6)
ETHERNET_100 = network(gigabits_per_s=100, name="Ethernet", latency_s=50e-6)
LINKS = {
    link.name: link
    for link in (
        *(pcie(generation=g) for g in (3, 4, 5, 6)),
        *(NVLINK2, NVLINK3, NVLINK4, NVLINK5, INFINITY_FABRIC),
        *(INFINIBAND_HDR, INFINIBAND_NDR, ETHERNET_10, ETHERNET_25, ETHERNET_100),
    )
}

# ----------------------------------------------------------------------------------------- nodes

DGX_A100 = Node(name="DGX A100", gpu=A100, num_gpus=8, intra_node=NVLINK3, network=INFINIBAND_HDR)
DGX_H100 = Node(name="DGX H100", gpu=H100, num_gpus=8, intra_node=NVLINK4, network=INFINIBAND_NDR)
DGX_B200 = Node(name="DGX B200", gpu=B200, num_gpus=8, intra_node=NVLINK5, network=INFINIBAND_NDR)
MI300X_NODE = Node(
    name="8 x MI300X", gpu=MI300X, num_gpus=8, intra_node=INFINITY_FABRIC, network=INFINIBAND_NDR
)
DGX_H200 = Node(name="DGX H200", gpu=H200, num_gpus=8, intra_node=NVLINK4, network=INFINIBAND_NDR)
PCIE_A100 = Node(
    name="4 x A100 on PCIe",
    gpu=A100,
    num_gpus=4,
    intra_node=pcie(generation=4),
    network=network(gigabits_per_s=25, name="Ethernet, a quarter of 100", latency_s=50e-6),
)
NODES = {
    node.name: node for node in (DGX_A100, DGX_H100, DGX_H200, DGX_B200, MI300X_NODE, PCIE_A100)
}
