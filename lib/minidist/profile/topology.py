"""Links between GPUs, from `nvidia-smi topo -m`, and the host's cores and network interfaces.

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

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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

    def nearest_nics(self, gpu: str) -> tuple[str, ...]:
        """The adapters with the best link to a GPU; the GPU's traffic should use these adapters."""
        nics = [device for device in self.devices if not device.startswith("GPU")]
        if not nics:
            return ()
        best = min(_distance(self.links[gpu, nic]) for nic in nics)
        return tuple(nic for nic in nics if _distance(self.links[gpu, nic]) == best)


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


def gpu_topology(timeout_s: float = 20.0) -> GPUTopology | None:
    """The topology of this machine's GPUs, or None without nvidia-smi or without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return parse_topo(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface. The bandwidth is None if the driver does not report it (lo, virtual
    interfaces)."""

    name: str
    is_up: bool
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class HostTopology:
    """Cores that this process may use, all cores by NUMA node, and the interfaces."""

    usable_cores: tuple[int, ...]
    numa_nodes: Mapping[int, str]
    interfaces: tuple[Interface, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.usable_cores)} usable cores"]
        lines += [f"NUMA node {node}: cores {cores}" for node, cores in self.numa_nodes.items()]
        for each in self.interfaces:
            speed = each.bandwidth_bytes_per_s
            rate = "speed unknown" if speed is None else f"{speed * 8 / 1e9:g} Gbit/s"
            lines.append(f"{each.name}: {'up' if each.is_up else 'down'}, {rate}")
        return "\n".join(lines)


def host_topology(sys_folder: str | Path = "/sys") -> HostTopology:
    """The host, from /sys on Linux; on other systems only the cores."""
    root = Path(sys_folder)
    nodes = {
        int(path.name[4:]): _read(path / "cpulist")
        for path in root.glob("devices/system/node/node[0-9]*")
    }
    interfaces = [
        Interface(
            name=path.name,
            # Loopback and tunnels report "unknown", but they work.
            is_up=_read(path / "operstate") in ("up", "unknown"),
            bandwidth_bytes_per_s=_speed(_read(path / "speed")),
        )
        for path in sorted(root.glob("class/net/*"))
        if (path / "operstate").exists()
    ]
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = list(range(os.cpu_count() or 1))
    return HostTopology(
        usable_cores=tuple(cores),
        numa_nodes=dict(sorted(nodes.items())),
        interfaces=tuple(interfaces),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a virtual interface has no speed
        return ""


def _speed(megabit: str) -> float | None:
    """Bytes per second from the kernel's Mbit/s; -1 means unknown."""
    try:
        value = int(megabit)
    except ValueError:
        return None
    return value * 1e6 / 8 if value > 0 else None
