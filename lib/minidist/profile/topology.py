"""Links between GPUs, from `nvidia-smi topo -m`.

>>> text = "\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV12\\t0-31\\nGPU1\\tNV12\\t X \\t0-31\\n"
>>> topology = parse_topo(text)
>>> topology.link("GPU0", "GPU1"), topology.affinity["GPU0"], topology.slowest()
('NV12', '0-31', ('GPU0', 'GPU1', 'NV12'))
>>> describe_link("NV12")
'12 NVLinks'

A ring is as fast as its slowest link, so look for the pair of GPUs with the worst link. PIX and PXB
stay below one PCIe root. PHB goes through a CPU, and SYS also from CPU to CPU, with a fraction of
the bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# From near to far.
LINKS = {
    "X": "itself",
    "NV": "NVLinks",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges, not through the CPU",
    "PHB": "PCIe through a CPU's host bridge",
    "NODE": "PCIe through several host bridges of one NUMA node",
    "SYS": "PCIe and the interconnect between NUMA nodes",
}


@dataclass(frozen=True, kw_only=True)
class GPUTopology:
    """The matrix of `nvidia-smi topo -m`.

    Attributes:
        devices: GPU0, …, NIC0, … as nvidia-smi names them.
        links: (row, column) -> NV12, PIX, SYS, ….
        affinity: GPU -> its CPU cores, as text.
        numa: GPU -> its NUMA node, as text.
        nics: NIC0 -> mlx5_0, ….
    """

    devices: tuple[str, ...]
    links: Mapping[tuple[str, str], str]
    affinity: Mapping[str, str] = field(default_factory=dict)
    numa: Mapping[str, str] = field(default_factory=dict)
    nics: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(device for device in self.devices if device.startswith("GPU"))

    def link(self, a: str, b: str) -> str:
        return self.links[a, b]

    def slowest(self) -> tuple[str, str, str] | None:
        """The two GPUs with the worst link between them; None for fewer than two GPUs."""
        pairs = [(a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :]]
        if not pairs:
            return None
        a, b = max(pairs, key=lambda pair: _distance(self.links[pair]))
        return a, b, self.links[a, b]


def _distance(link: str) -> float:
    """A number for comparing links: first by kind; among NVLinks, fewer links are farther."""
    match = re.fullmatch(r"NV(\d+)", link)
    if match:
        return 1 + 1 / (1 + int(match[1]))
    return list(LINKS).index(link) if link in LINKS else len(LINKS)


def describe_link(link: str) -> str:
    """A link's abbreviation in words."""
    match = re.fullmatch(r"NV(\d+)", link)
    if match:
        return f"{match[1]} NVLinks"
    return LINKS.get(link, f"unknown link {link!r}")


def parse_topo(text: str) -> GPUTopology:
    """The matrix that `nvidia-smi topo -m` prints, with its legend of adapters.

    Raises:
        ValueError: no line begins with white space and GPU0.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # remove the codes that underline the heading
    lines = [line.rstrip() for line in text.splitlines()]
    at = next((i for i, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if at is None:
        raise ValueError("parse_topo: expected the matrix of `nvidia-smi topo -m`, found no GPU0")
    heads = [head.strip() for head in lines[at].split("\t")[1:]]
    devices = tuple(head for head in heads if re.fullmatch(r"(GPU|NIC)\d+|mlx\d+_\d+", head))
    links: dict[tuple[str, str], str] = {}
    affinity: dict[str, str] = {}
    numa: dict[str, str] = {}
    for line in lines[at + 1 :]:
        name, *cells = (cell.strip() for cell in line.split("\t"))
        if name not in devices:
            continue
        for head, cell in zip(heads, cells, strict=False):
            if head in devices:
                links[name, head] = cell
            elif head == "CPU Affinity" and cell:
                affinity[name] = cell
            elif head == "NUMA Affinity" and cell:
                numa[name] = cell
    nics = dict(re.findall(r"^\s+(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    return GPUTopology(devices=devices, links=links, affinity=affinity, numa=numa, nics=nics)
