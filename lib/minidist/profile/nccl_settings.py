"""NCCL's and torch's environment variables as data: effect, default, and when to set each one.

Sources: NVIDIA's NCCL user guide, "Environment Variables"; torch's ProcessGroupNCCL.hpp and
FlightRecorder.hpp. Defaults are those of NCCL 2.2x and torch 2.11 to 2.13.

>>> BY_NAME["NCCL_BUFFSIZE"].default, BY_NAME["TORCH_NCCL_TRACE_BUFFER_SIZE"].name
('4194304', 'TORCH_FR_BUFFER_SIZE')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["network", "intra-node", "tuning", "debugging", "torch", "cuda"]


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Args:
        when: the situation in which to set the variable.
        old_names: former names of the variable; some still work.
    """

    name: str
    group: Group
    what: str
    default: str
    when: str
    old_names: tuple[str, ...] = ()


SETTINGS: tuple[Setting, ...] = (
    # --------------------------------------------------------------------------------- network
    Setting(
        "NCCL_SOCKET_IFNAME",
        "network",
        "IP interfaces for set-up and, without InfiniBand, for data: prefixes; ^ excludes, = exact",
        "all but lo and docker*, ib* first",
        "several interfaces of which only some reach the other nodes",
    ),
    Setting(
        "NCCL_IB_DISABLE",
        "network",
        "1: no InfiniBand or RoCE, sockets instead",
        "0",
        "to find out whether InfiniBand is the problem; never for good",
    ),
    Setting(
        "NCCL_IB_HCA",
        "network",
        "InfiniBand or RoCE adapters to use, as device:port; ^ excludes, = exact",
        "all",
        "adapters for storage or management that must not carry gradients",
    ),
    Setting(
        "NCCL_IB_GID_INDEX",
        "network",
        "which global id RoCE uses, hence which version and route",
        "-1, chosen by NCCL",
        "RoCE that connects and then times out",
    ),
    Setting(
        "NCCL_IB_TIMEOUT",
        "network",
        "InfiniBand's own timeout, 4.096 us x 2^value per try",
        "20",
        "very large or lossy fabrics, with error 12 in the log",
    ),
    Setting(
        "NCCL_IB_QPS_PER_CONNECTION",
        "network",
        "queue pairs per connection, spread over routes",
        "1",
        "fabrics that balance by flow (ECMP): 2 to 4",
    ),
    Setting(
        "NCCL_CROSS_NIC",
        "network",
        "0: a ring leaves and enters nodes by the same adapter; 1: not so; 2: if needed",
        "2",
        "rail-optimised fabrics (0), or all adapters on one switch (1)",
    ),
    Setting(
        "NCCL_NET_GDR_LEVEL",
        "network",
        "how far apart GPU and adapter may be for GPUDirect RDMA: LOC, PIX, PXB, PHB, SYS",
        "chosen by NCCL",
        "nvidia-smi topo -m shows a close pair that NCCL does not use",
    ),
    Setting(
        "NCCL_SOCKET_NTHREADS",
        "network",
        "CPU threads per connection over sockets",
        "1 to 4, by provider",
        "100 Gbit/s Ethernet without RDMA: 4",
    ),
    Setting(
        "NCCL_NSOCKS_PERTHREAD",
        "network",
        "sockets per such thread; threads x sockets must be at most 64",
        "1 to 8, by provider",
        "as NCCL_SOCKET_NTHREADS",
    ),
    # ------------------------------------------------------------------------------ intra-node
    Setting(
        "NCCL_P2P_DISABLE",
        "intra-node",
        "1: no direct access between GPUs, neither NVLink nor PCIe",
        "0",
        "to find out whether peer access hangs (IOMMU or ACS in a virtual machine)",
    ),
    Setting(
        "NCCL_P2P_LEVEL",
        "intra-node",
        "how far apart GPUs may be for peer access: LOC, NVL, PIX, PXB, PHB, SYS",
        "chosen by NCCL",
        "PCIe machines where traffic through the CPU is slower than shared memory; NVL does not "
        "give more NVLink, it forbids PCIe",
    ),
    Setting(
        "NCCL_SHM_DISABLE",
        "intra-node",
        "1: no shared memory between GPUs without peer access",
        "0",
        "containers with a tiny /dev/shm, until that is enlarged (--shm-size)",
    ),
    Setting(
        "NCCL_NVLS_ENABLE",
        "intra-node",
        "reduction inside the NVSwitch (NVLink SHARP): 0 never, 1 if possible, 2 automatic",
        "2",
        "0 to save memory, or to rule it out as the reason of an error",
    ),
    # ---------------------------------------------------------------------------------- tuning
    Setting(
        "NCCL_ALGO",
        "tuning",
        "algorithms that NCCL may use: Ring, Tree, NVLS, CollNet...; ^ excludes",
        "chosen by size and topology",
        "experiments; forcing one makes some sizes slower and forbids in-network reduction",
    ),
    Setting(
        "NCCL_PROTO",
        "tuning",
        "protocols that NCCL may use: LL, LL128, Simple; ^ excludes",
        "chosen by size and hardware",
        "to exclude one that is suspected of a fault",
    ),
    Setting(
        "NCCL_BUFFSIZE",
        "tuning",
        "bytes of the buffer between a pair of GPUs, per channel",
        "4194304",
        "smaller to save memory with very many ranks",
    ),
    Setting(
        "NCCL_MIN_CTAS",
        "tuning",
        "fewest thread blocks (multiprocessors) that a collective may take",
        "chosen by NCCL",
        "hardly ever",
        ("NCCL_MIN_NCHANNELS",),
    ),
    Setting(
        "NCCL_MAX_CTAS",
        "tuning",
        "most thread blocks that a collective may take",
        "chosen by NCCL",
        "overlapped communication that slows computation down by taking its multiprocessors",
        ("NCCL_MAX_NCHANNELS",),
    ),
    Setting(
        "NCCL_NCHANNELS_PER_NET_PEER",
        "tuning",
        "channels per remote peer of sends and receives, which an all-to-all is made of, too",
        "2, or more by the bandwidth of the network",
        "pipelines or all-to-all with few peers and a fast network",
    ),
    # ------------------------------------------------------------------------------- debugging
    Setting(
        "NCCL_DEBUG",
        "debugging",
        "how much NCCL writes to stdout: VERSION, WARN, INFO, TRACE",
        "nothing",
        "WARN always does no harm; INFO to see rings, adapters and versions",
    ),
    Setting(
        "NCCL_DEBUG_SUBSYS",
        "debugging",
        "which parts write INFO lines: INIT, GRAPH, NET, COLL, TUNING, ENV, ALL; ^ excludes",
        "INIT,BOOTSTRAP,ENV",
        "GRAPH and TUNING to see what was chosen, NET for the network",
    ),
    Setting(
        "NCCL_DEBUG_FILE",
        "debugging",
        "where those lines go; %h is the host, %p the process",
        "stdout",
        "many ranks; with %h and %p, or they write over each other",
    ),
    Setting(
        "NCCL_TOPO_DUMP_FILE",
        "debugging",
        "writes the topology that NCCL found, as XML",
        "none",
        "NCCL uses a path that nvidia-smi topo -m does not suggest",
    ),
    # ----------------------------------------------------------------------------------- torch
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "torch",
        "what a timed-out collective does: 0 nothing, 1 abort and end the process, 2 abort only, "
        "3 end the process",
        "3",
        "never 0 in production",
        ("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "torch",
        "1: wait() blocks the host until the collective is over, and raises at its timeout",
        "0",
        "debugging with an exception at the right line; costs all overlap",
        ("NCCL_BLOCKING_WAIT",),
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "torch",
        "a thread that ends the process when NCCL's watchdog thread is stuck itself",
        "1",
        "0 only with a debugger attached",
    ),
    Setting(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "torch",
        "how long the watchdog may show no sign of life",
        "480",
        "longer where start-up blocks for minutes (huge checkpoints, slow file systems)",
    ),
    Setting(
        "TORCH_FR_BUFFER_SIZE",
        "torch",
        "entries of the flight recorder, the list of the last collectives; 0 turns it off",
        "2000",
        "larger when 2000 collectives are less than a step",
        ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    ),
    Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "torch",
        "1: on a timeout every rank writes its flight recorder to a file",
        "1",
        "leave it on: it costs nothing until something hangs",
    ),
    Setting(
        "TORCH_FR_DUMP_TEMP_FILE",
        "torch",
        "prefix of those files; the rank is appended",
        "in the user's cache folder, or /tmp",
        "a folder that outlives the container",
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    ),
    Setting(
        "TORCH_FR_CPP_STACK",
        "torch",
        "1: C++ frames in the recorder, too",
        "0",
        "a collective that no Python line calls",
        ("TORCH_NCCL_TRACE_CPP_STACK",),
    ),
    Setting(
        "TORCH_NCCL_ENABLE_TIMING",
        "torch",
        "1: start events, so that the recorder knows how long each collective took",
        "0",
        "finding slow collectives; more CUDA events, small cost",
        ("NCCL_ENABLE_TIMING",),
    ),
    Setting(
        "TORCH_NCCL_DESYNC_DEBUG",
        "torch",
        "1: on a timeout, say which ranks are at which collective",
        "0",
        "the flight recorder says more",
        ("NCCL_DESYNC_DEBUG",),
    ),
    Setting(
        "TORCH_NCCL_NAN_CHECK",
        "torch",
        "1: look for NaN in what is about to be sent, and stop",
        "0",
        "finding the rank that a NaN comes from",
    ),
    Setting(
        "TORCH_NCCL_HIGH_PRIORITY",
        "torch",
        "1: communication on high-priority streams",
        "0",
        "collectives that queue behind long kernels",
    ),
    Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        "torch",
        "OFF, INFO, DETAIL: DETAIL compares shapes and order of every collective on all ranks",
        "OFF",
        "a hang or wrong sums without an explanation; slow",
    ),
    # ------------------------------------------------------------------------------------ cuda
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        "cuda",
        "1: the host waits for every kernel",
        "0",
        "finding the line of a CUDA error; never when measuring",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "cuda",
        "hardware queues from the host to a GPU",
        "8",
        "1 for Megatron's overlap of tensor-parallel communication, which relies on launch order; "
        "with FSDP, 1 hinders overlap",
    ),
)

# By name, including old names.
BY_NAME = {name: setting for setting in SETTINGS for name in (setting.name, *setting.old_names)}
