# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 10 · Many nodes: launching, networks, hangs and failures
#
# On one machine all ranks start together, see one another, and end together. With many machines
# none of that holds. Somebody has to start a process on each, they have to find each other, the
# wires between them differ, and the more machines there are, the more often one breaks.
#
# After this lecture you can
#
# - launch a job on many nodes, and say what torchrun and Slurm each do;
# - say what a rendezvous is, and find out why one does not come together;
# - estimate what a network costs, and see which NCCL settings are dangerous;
# - read a hang: which rank is missing from which collective, at which line;
# - choose how often to save, from two numbers;
# - save while training goes on, and say what may change meanwhile;
# - kill a node of a running job, and watch the job go on with the same loss curve;
# - go on without a lost group from one step to the next, and find a rank whose memory has failed.
#
# It takes about 120 minutes. The jobs in this lecture start their own processes, as they do on a
# cluster. So all cells begin with `%%rank 0`: one rank of this notebook's kernel starts them. They
# train on GPUs where there is one for each of their ranks, else on the CPU. Eight times the lecture
# asks for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: longer jobs in sections 6 and 7

# %%
# %%rank 0
# %matplotlib inline
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from IPython.display import display

from minidist import cost, emulate
from minidist.claims import claim
from minidist.device import choose_device
from minidist.elastic import share_of_batch
from minidist.errors import LaunchError
from minidist.launch import free_port, run
from minidist.mesh import MeshShape
from minidist.plots import PALETTE, new_figure, plot_lines, plot_timeline, style
from minidist.widgets import explore, predict

# In the kernel's own folder, which goes when the kernel ends, however it ends.
temporary = tempfile.TemporaryDirectory(prefix="lecture10-", dir=os.environ.get("MINIDIST_RUN_DIR"))
work = Path(temporary.name)
device = choose_device(local_rank=0, local_world_size=1)  # of what needs one process

# %% [markdown]
# The lecture in one picture: how long a job runs before something breaks. Llama 3's training on
# 16,384 GPUs, which are 2,048 nodes of 8, had 466 interruptions in 54 days, of which 47 were
# planned and 419 were not ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783)). That is an
# unplanned one every three hours. We count each as the failure of a node.

# %%
# %%rank 0
node_guess = predict(
    "How many days did a single node run before it broke, on average?",
    guess=None,
    unit="days",
)
node_guess

# %% [markdown]
# Each line of the figure is a cluster whose *nodes* fail independently, once in so many days on
# average. The first line has Llama 3's nodes.

# %%
# %%rank 0
nodes = np.array([1, 8, 64, 256, 1024, 2048, 4096])
llama_nodes, llama_interruptions, llama_days = 2048, 466 - 47, 54
node_days = llama_nodes * llama_days / llama_interruptions
plot_lines(
    nodes,
    {f"{days:.0f} days per node": 24 * days / nodes for days in (node_days, 1000, 100)},
    logx=True,
    logy=True,
    ticks=list(nodes),
    xlabel="nodes of 8 GPUs",
    ylabel="hours between failures",
    title="A job is as fragile as its nodes together",
)

# %%
# %%rank 0
display(
    node_guess.reveal(node_days),
    claim(
        "unexpected interruptions of Llama 3's training in 54 days (47 more were planned)",
        419,
        status="cited",
        authority="The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4",
    ),
    claim(
        "hours between unexpected interruptions of that job",
        24 * llama_days / llama_interruptions,
        3.09,
        rtol=0.002,
    ),
    claim("days between failures of one of its nodes", node_days, 264, rtol=0.001),
    claim("GPUs of 256 nodes of 8", MeshShape(dp=256, tp=8).world_size, 2048, kind="arithmetic"),
)

# %% [markdown]
# ## 1 · Launching: who starts what
#
# A training script has to know who it is and where the others are.
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) tells each process in
# environment variables.
#
# | variable | means | 2 nodes × 8 |
# |---|---|---|
# | `WORLD_SIZE` | all processes | 16 |
# | `RANK` | number of this one among all | 0 … 15 |
# | `LOCAL_RANK` | its number on this node: choose the GPU by it | 0 … 7 |
# | `MASTER_ADDR`, `MASTER_PORT` | where the store listens by which all meet | the same on all |
#
# On **every node** one torchrun runs, the *agent*. It starts the node's workers, watches them, and
# meets the other agents. Two ways to say how they meet:
#
# ```
# # static: you number the nodes and name the first one
# torchrun --nnodes=2 --nproc-per-node=8 --node-rank=0 \
#          --master-addr=10.0.0.1 --master-port=29500 train.py      # on the first node
# torchrun --nnodes=2 --nproc-per-node=8 --node-rank=1 \
#          --master-addr=10.0.0.1 --master-port=29500 train.py      # on the second
#
# # rendezvous: the same command on all nodes; they agree on numbers by themselves
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 \
#          --rdzv-id=job42 train.py
# ```
#
# The static way has one trap: the same `--node-rank` twice, and both wait until a timeout of many
# minutes. The second way
# is also the elastic one (section 6). (`torch.distributed.launch` is deprecated; torchrun is its
# successor.)
#
# Two agents on one machine do what two machines do. Here is a two-node job on yours. Each worker
# writes down who it is.

# %%
# %%rank 0
SCRIPT = work / "who.py"
SCRIPT.write_text(
    """import json, os, sys
import torch, torch.distributed as dist
from minidist.device import choose_backend, choose_device
device = choose_device()
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(choose_backend())
total = torch.tensor([float(dist.get_rank())], device=device)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
found = {name: int(os.environ[name]) for name in names} | {"sum": total.item()}
found |= {"backend": dist.get_backend(), "device": str(device)}
with open(f"{sys.argv[1]}/rank{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""
)
# This notebook runs under a torchrun itself; its variables must not reach the jobs that it starts.
INHERITED = ("TORCHELASTIC", "TORCH_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_", "MASTER_")
QUIET = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED)}
QUIET |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(work)}  # an agent that is killed leaves its logs
QUIET["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # that store would remember lost workers
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]


def gpus_of(node: int, num_nodes: int) -> dict[str, str]:
    """What a node sees of this machine's GPUs: one of its own, or none if there are too few."""
    enough = torch.cuda.device_count() >= num_nodes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[node] if len(visible) >= num_nodes else str(node)
    return {"CUDA_VISIBLE_DEVICES": name if enough else ""}


def torchrun(
    node: int, port: int, *words: str, conf: str = "keep_alive_max_attempt=3"
) -> list[str]:
    """torchrun's command for a node of this machine, which has to be told who hosts the store."""
    conf += f",keep_alive_interval=1,last_call_timeout=5,is_host={int(node == 0)}"
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
    return [*TORCHRUN, *meet, "--rdzv-id=lecture10", "--local-addr=127.0.0.1", *words]


def start_nodes(num_nodes: int, *words: str) -> list[subprocess.Popen]:
    """One torchrun agent per node, each a process group of its own and one worker."""
    port, agents = free_port(), []
    for node in range(num_nodes):
        agents.append(
            subprocess.Popen(
                torchrun(node, port, *words),
                env=QUIET | gpus_of(node, num_nodes),
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return agents


agents = start_nodes(2, "--nnodes=2", str(SCRIPT), str(work))
codes = [agent.wait(300) for agent in agents]
who = [json.loads((work / f"rank{r}.json").read_text()) for r in range(2)]
for each in who:
    print(each)

# %%
# %%rank 0
display(
    claim("both agents ended well", codes, [0, 0]),
    claim("2 nodes x 1 worker: WORLD_SIZE of each", [w["WORLD_SIZE"] for w in who], [2, 2]),
    claim("LOCAL_RANK begins at 0 on each node", [w["LOCAL_RANK"] for w in who], [0, 0]),
    claim(
        "number of the node (GROUP_RANK) = RANK // LOCAL_WORLD_SIZE",
        [w["RANK"] // w["LOCAL_WORLD_SIZE"] for w in who],
        [w["GROUP_RANK"] for w in who],
    ),
    claim("an all-reduce crosses the nodes", [w["sum"] for w in who], [1.0, 1.0], rtol=1e-9),
    claim(
        "2 nodes x 8 and 2 nodes x 4: ranks",
        [MeshShape(dp=2, tp=8).world_size, MeshShape(dp=2, tp=4).world_size],
        [16, 8],
        kind="arithmetic",
    ),
)

# %% [markdown]
# ### Slurm
#
# [Slurm](https://slurm.schedmd.com/sbatch.html) gives you nodes and starts a command on each.
# torchrun does the rest. One task **per node**, not per GPU:
#
# ```
# #!/bin/bash
# #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
# #SBATCH --time=24:00:00 --signal=B:USR1@300     # a warning five minutes before the end
# #SBATCH --requeue                               # start again when preempted
# trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1   # tell the steps, that is the torchruns
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun --kill-on-bad-exit=0 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
#      --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \
#      --max-restarts=3 --shutdown-timeout=240 train.py &
# wait; wait                                        # the first is left when the trap runs
# ```
#
# - Without torchrun, `srun --ntasks-per-node=8` starts the workers itself; then set RANK from
#   `SLURM_PROCID`, LOCAL_RANK from `SLURM_LOCALID` and WORLD_SIZE from `SLURM_NTASKS`, and
#   MASTER_ADDR and MASTER_PORT yourself.
# - `--signal=B:USR1@300` sends SIGUSR1 to the *batch shell*, and the shell sends SIGTERM to the
#   steps. Not `--signal=USR1@300`: torchrun hands SIGTERM, SIGINT, SIGHUP and SIGQUIT on to its
#   workers and dies of a SIGUSR1, unless its option `--signals-to-handle` names it. (It overwrites
#   the variable `TORCHELASTIC_SIGNALS_TO_HANDLE`.) The workers get `--shutdown-timeout` seconds (an
#   option since torch 2.13; without it 30) before they are killed.
# - `minidist.elastic.Preemption` listens to SIGTERM and SIGUSR1 in the workers, and lets all ranks
#   agree to save and leave at the same step.
# - `--time` kills without a checkpoint if you ignore the warning.
#
# ### The rendezvous does not come together
#
# All agents wait, and none says for what. Ask in this order: can every node reach the endpoint's
# port (`nc -z host port`)? Is `--nnodes` what really starts? Do all have the same `--rdzv-id`? Does
# the head node know itself by that name (torchrun guesses who hosts the store by comparing names;
# in containers tell it: `--rdzv-conf is_host=1` on the head, `is_host=0` elsewhere)? Does gloo or
# NCCL take the right interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`)? Give the wait a short
# limit, so that it soon fails with a message. Here is a job that waits for a second node that never
# comes:

# %%
# %%rank 0
lonely = torchrun(
    0,
    free_port(),
    "--nnodes=2",
    str(SCRIPT),
    str(work),
    conf="keep_alive_max_attempt=3,join_timeout=3",
)
began = time.monotonic()
ended = subprocess.run(lonely, env=QUIET, capture_output=True, text=True, timeout=300, check=False)
waited = time.monotonic() - began
message = [line for line in ended.stderr.splitlines() if "Rendezvous" in line][-1:]
print(f"code {ended.returncode} after {waited:.0f} s: {message}")

# %%
# %%rank 0
display(
    claim(
        "a rendezvous without its second node ends with an error",
        ended.returncode,
        lambda code: code != 0,
    ),
    claim("... that names the rendezvous", "RendezvousTimeoutError" in ended.stderr, True),
    claim("... not before its limit of 3 s", waited, (">", 3.0)),
)

# %% [markdown]
# ## 2 · Networks
#
# Inside a DGX H100 a GPU sends 450 GB/s over NVLink. Between nodes it has one port of 400 Gbit/s:
# 50 GB/s. Bits and bytes get mixed up here; divide by eight. Ethernet of 100 Gbit/s for the *whole
# node*, shared by eight GPUs, is 1.6 GB/s for each.
#
# The emulated cluster shows what that does. One DDP-like all-reduce of gradients is replayed on
# clusters that differ in the wire between the nodes only.


# %%
# %%rank 0
def two_node_step(num_layers: int, layer_bytes: int) -> None:
    """Backward of some layers, each with the all-reduce of its gradients beside it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from minidist.emulate import Charged

    layers = [Charged(nn.Linear(8, 8), i) for i in range(num_layers)]
    x = torch.ones(4, 8)
    for layer in layers:
        x = layer(x)
    works = []

    def send(_) -> None:
        works.append(dist.all_reduce(torch.ones(layer_bytes // 4), async_op=True))

    for layer in layers:
        layer.module.weight.register_post_accumulate_grad_hook(send)
    x.sum().backward()
    for work_item in works:
        work_item.wait()


from minidist.emulate.teach import run_traced

LAYERS, LAYER_BYTES = 6, 1 << 20
plan = emulate.ChargePlan((1e-3,) * LAYERS, (2e-3,) * LAYERS, b"lecture 10")
_, trace = run_traced(two_node_step, 4, LAYERS, LAYER_BYTES, plan=plan)
box = replace(emulate.clusters.dgx_h100(), nodes=2, devices_per_node=2)


def wire(bytes_per_s: float, latency_s: float = 10e-6) -> emulate.Cluster:
    link = emulate.Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    return replace(box, name=f"{bytes_per_s / 1e9:.3g} GB/s", inter_node=link)


plot_timeline(emulate.simulate(trace, wire(0.6e9)), title="Two nodes of two, 0.6 GB/s between them")

# %% [markdown]
# Compute above, communication below. Backward is over, and the gradients are still on the wire. A
# faster wire helps, and from some speed on it does not matter any more. But a message also has a
# latency.

# %%
# %%rank 0
latency_guess = predict(
    "800 Gbit/s, 1 ms of latency, 18 ms of compute: how long is the step?",
    guess=None,
    unit="ms",
)
latency_guess

# %% [markdown]
# First the speed alone, with a latency of 10 µs:


# %%
# %%rank 0
def step_ms(bytes_per_s: float, latency_s: float = 10e-6) -> float:
    return 1e3 * emulate.simulate(trace, wire(bytes_per_s, latency_s)).makespan_s


speeds = np.geomspace(1e8, 1e11, 25)
WIRES = {"1 Gbit/s": 0.125e9, "10": 1.25e9, "100": 12.5e9, "400": 50e9}
figure = plot_lines(
    speeds * 8 / 1e9,
    {"step": [step_ms(s) for s in speeds]},
    logx=True,
    xlabel="wire between the nodes (Gbit/s)",
    ylabel="step (ms)",
    title="6 MiB of gradients, 18 ms of compute",
    ideal={"compute alone": np.full(25, 18.0)},
)
figure

# %% [markdown]
# Now the latency. A ring of four ranks sends six messages after each other for an all-reduce, and
# there are six all-reduces, one for each layer.

# %%
# %%rank 0
ring_s = 2 * 3 / 4 * LAYER_BYTES / 1e8 + 6 * 10e-6  # of one layer on the slowest wire
bottom = 6 + 2 + LAYERS * 1e3 * ring_s  # forward, the last layer's backward, then only the wire
names = ("10 Gbit/s Ethernet", "100 Gbit/s Ethernet", "HDR", "NDR")
gigabytes = [
    link.bandwidth_bytes_per_s / 1e9
    for link in (cost.ETHERNET_10, cost.ETHERNET_100, cost.INFINIBAND_HDR, cost.INFINIBAND_NDR)
]
display(
    latency_guess.reveal(step_ms(1e11, 1e-3)),
    claim(
        "10 and 100 Gbit/s Ethernet, InfiniBand HDR and NDR, in GB/s",
        gigabytes,
        [1.25, 12.5, 25, 50],
        rtol=1e-9,
    ),
    claim(
        "slow wire: forward, one layer's backward, then the ring for every layer, ms",
        step_ms(1e8),
        bottom,
        rtol=1e-3,
    ),
    claim("fast wire: step / compute", step_ms(1e11) / 18, ("<", 1.02)),
    claim(
        "the same wire with 1 ms of latency: step, ms",
        step_ms(1e11, 1e-3),
        8 + LAYERS * 6.0,
        rtol=0.02,
    ),
)

# %% [markdown]
# 36 messages of 1 ms, one after the other, cannot hide behind 18 ms of compute. Fewer and larger
# buckets (lecture 3) would help here. Try other wires:


# %%
# %%rank 0
def wire_explorer(log_speed: float = 9.0, latency_us: int = 10):
    """The step of two nodes as a timeline, on the chosen wire."""
    timeline = emulate.simulate(trace, wire(10**log_speed, latency_us / 1e6))
    return plot_timeline(
        timeline,
        title=f"{8 * 10**log_speed / 1e9:.3g} Gbit/s, {latency_us} µs: "
        f"{1e3 * timeline.makespan_s:.1f} ms",
    )


explore(
    wire_explorer,
    log_speed=(8.0, 11.0, 0.25),
    latency_us=[1, 10, 100, 1000],
    labels={"log_speed": "wire, log10 of bytes/s", "latency_us": "latency (µs)"},
    alt="Timeline of four ranks on two nodes: compute, communication and waiting",
)

# %% [markdown]
# The remedies you know: overlap (lecture 3), fewer bytes (lecture 4), hierarchical rings and HSDP
# (lectures 2, 5), pipelines between nodes (7), the right order of axes (9).
#
# ### NCCL's settings
#
# NCCL detects the machine's topology, estimates with a model of its own what each algorithm would
# take (lecture 2), and rarely needs help. Variables from blog posts were set for somebody else's
# machine. NCCL's
# [documentation](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) has them all;
# `minidist.profile.nccl` knows which values cost speed, data, or the explanation of a hang. Below,
# a list from a common slide set.

# %%
# %%rank 0
from minidist.profile.nccl import explain, find_dangers

slide = {
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_ALGO": "Tree",
    "NCCL_NCHANNELS_PER_NET_PEER": "4",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth0",
}
for row in explain(slide):
    print(f"{row.name} = {row.value}: {row.what}")
dangers = find_dangers(slide | {"NCCL_PROTO": "LL128", "NCCL_IB_DISABLE": "1"})
for danger in dangers:
    print("!", ", ".join(danger.names), "-", danger.text)

# %%
# %%rank 0
display(
    claim("forcing LL128 is reported", any("NCCL_PROTO" in d.names for d in dangers), True),
    claim(
        "turning InfiniBand off is reported",
        any("NCCL_IB_DISABLE" in d.names for d in dangers),
        True,
    ),
    claim(
        "torch's timeout of NCCL collectives, minutes (gloo: 30)",
        10,
        status="cited",
        authority="PyTorch, documentation of init_process_group",
    ),
)

# %% [markdown]
# ## 3 · A hang, and the flight recorder
#
# A rank that dies is easy to see. A rank that goes *another way* is not: it skips a collective, the
# others wait in it, nothing is printed, and GPUs show 100 % (waiting kernels are busy). After the
# timeout every rank that waits says "Watchdog caught collective operation timeout".
#
# torch keeps a list of the last collectives of each process: the
# [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)
# (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_DUMP_ON_TIMEOUT`). In each group the k-th collective of one
# rank belongs to the k-th of the others. So the lists tell who is missing. We break it on purpose:
# rank 2 of 4 has a small gradient and skips an all-reduce under an `if`. All ranks end with a
# barrier.

# %%
# %%rank 0
hang_guess = predict(
    "Rank 2 of 4 skips an all-reduce. How many ranks hang?",
    guess=None,
)
hang_guess

# %% [markdown]
# Three steps; the third goes wrong.


# %%
# %%rank 0
def skips_one(folder: str, mended: bool) -> str:
    """Three steps; in the third, rank 2 has no reason to clip, and does not ask the others."""
    from datetime import timedelta

    import torch.distributed as dist

    from minidist.profile.flight import dump_on_hang

    # gloo and the CPU also where there are GPUs: its timeout is an exception that we can catch,
    # while NCCL's watchdog would end the process.
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    try:
        with dump_on_hang(folder, after_s=2):
            for step in range(3):
                gradient = torch.ones(4)
                dist.all_reduce(gradient)
                norm = torch.tensor(1.0 if step == 2 and dist.get_rank() == 2 else 10.0)
                if mended or norm > 5:  # broken: a collective under a condition of this rank
                    dist.all_reduce(norm)
            dist.barrier()
    except RuntimeError as error:
        return f"timed out: {type(error).__name__}"
    return "fine"


dumps = work / "dumps"
try:
    outcome = run(skips_one, 4, str(dumps), False, deadline_s=45)
except LaunchError as error:
    outcome = [str(error)]
print(outcome)

# %%
# %%rank 0
from minidist.profile.flight import explain_hang, find_mismatches, find_stuck, read_dumps

found = read_dumps(dumps)
print(explain_hang(found))

# %% [markdown]
# All four ranks hang, the guilty one too: it waits in the barrier, which is its next
# collective. So the timeout alone does not tell who is guilty. The recorder does. Which ranks wait
# in which collective? Which one called something else at the same number, and at which line? Look
# for an `if` above that line.
#
# The rule behind all these bugs: **every rank of a group calls the same collectives in the same
# order**. Whatever a rank knows alone (its loss, its sampler, its clock, `rank == 0`) must not
# decide about a collective. Mended, everybody asks, and decides afterwards.

# %%
# %%rank 0
mended = run(skips_one, 4, str(work / "none"), True, deadline_s=45)
calls = [call for mismatch in find_mismatches(found) for call in mismatch.calls]
names = [call.name for call in calls]
guilty = {call.rank for call in calls if names.count(call.name) == 1}
absent = {r for stuck in find_stuck(found) for r in stuck.missing}
display(
    claim(
        "the recorder names rank 2, as missing or as calling something else",
        2 in (guilty | absent),
        True,
    ),
    hang_guess.reveal(len(found)),
    claim("all four ranks left a dump", sorted(found), [0, 1, 2, 3]),
    claim("the mended program", " ".join(mended), "fine fine fine fine"),
)

# %% [markdown]
# On a cluster NCCL's ranks write their lists at a timeout by themselves
# (`TORCH_NCCL_DUMP_ON_TIMEOUT` is on). Give them a path on a shared disk
# (`TORCH_FR_DUMP_TEMP_FILE`), and `torchfrtrace` compares the files.
# [`py-spy dump`](https://github.com/benfred/py-spy) shows where a process stands. Make the timeout
# short while you look for a bug, and long where one rank has real work to do (rank 0 writes a
# checkpoint).
#
# ## 4 · How often to save
#
# Saving costs δ seconds each time. A failure costs the work since the last checkpoint, which is
# half an interval on average, and the restart, R seconds. With failures M seconds apart on average
# and a checkpoint every τ seconds, the share of time that is lost is about
#
# $$ \frac{\delta}{\tau} + \frac{\tau}{2M} + \frac{R}{M}, \qquad \text{smallest at } \tau =
# \sqrt{2\,\delta\,M}. $$
#
# That is Young's formula (1974). Below, Llama 3's job has a failure every 3.1 hours, and a save
# that takes a minute.

# %%
# %%rank 0
interval_guess = predict("How many minutes apart should that job save?", guess=None, unit="minutes")
interval_guess

# %% [markdown]
# The dots are a simulation that throws dice for failures and knows no formula. (Far from the best
# interval the formula is too pessimistic; near it, they agree.)


# %%
# %%rank 0
def lost(interval_s: float, save_s: float, between_s: float, restart_s: float = 300.0) -> float:
    return save_s / interval_s + interval_s / (2 * between_s) + restart_s / between_s


def simulate_lost(
    interval_s: float,
    save_s: float,
    between_s: float,
    restart_s: float = 300.0,
    num_failures: int = 4000,
) -> float:
    """Share of the time that is not progress, with failures at random times."""
    rng = np.random.default_rng(0)
    useful = total = 0.0
    for gap in rng.exponential(between_s, num_failures):
        useful += gap // (interval_s + save_s) * interval_s  # what was saved before the failure
        total += gap + restart_s
    return 1 - useful / total


SAVE_S, BETWEEN_S = 60.0, 3600 * 24 * llama_days / llama_interruptions
intervals = np.geomspace(100, 20000, 40)
few = np.geomspace(150, 15000, 9)
figure = plot_lines(
    {"formula": intervals / 60, "simulated": few / 60},
    {"formula": [100 * lost(t, SAVE_S, BETWEEN_S) for t in intervals]},
    logx=True,
    xlabel="minutes between checkpoints",
    ylabel="time lost (%)",
    title="A failure every 3.1 hours, a save takes a minute",
)
dots = [simulate_lost(t, SAVE_S, BETWEEN_S) for t in few]
figure.axes[0].plot(few / 60, [100 * d for d in dots], "o", color=PALETTE[1], label="simulated")
figure.legend(frameon=False, loc="outside upper right")
figure

# %% [markdown]
# The minimum is flat. By the dice, at half of the best interval the job loses 15 % more, and at six
# times the interval two and a half times as much.

# %%
# %%rank 0
young = (2 * SAVE_S * BETWEEN_S) ** 0.5
best = min(intervals, key=lambda t: lost(t, SAVE_S, BETWEEN_S))
diced = {k: simulate_lost(k * young, SAVE_S, BETWEEN_S, num_failures=40_000) for k in (0.5, 1, 6)}
display(
    interval_guess.reveal(young / 60),
    claim(
        "best interval for that job, minutes",
        young / 60,
        19.3,
        rtol=0.01,
        authority="Young, A first order approximation to the optimum checkpoint interval, 1974",
    ),
    claim("best interval found by trying 40 / Young's", best / young, 1.0, rtol=0.15),
    claim(
        "time lost there, simulated / formula",
        diced[1] / lost(young, SAVE_S, BETWEEN_S),
        1.0,
        rtol=0.1,
    ),
    claim(
        "dice: saving twice as often as Young says loses this many times as much",
        diced[0.5] / diced[1],
        1.15,
        rtol=0.02,
    ),
    claim(
        "dice: saving a sixth as often loses this many times as much",
        diced[6] / diced[1],
        2.5,
        rtol=0.03,
    ),
    claim(
        "LLaMA-2 70B with Adam: GB of a checkpoint (fp32 weights and moments)",
        cost.LLAMA2_70B.num_parameters * 12 / cost.GB,
        828,
        rtol=0.01,
    ),
)

# %% [markdown]
# Other clusters and other disks:


# %%
# %%rank 0
def save_explorer(nodes: int = 256, node_days: int = 250, save_s: int = 60):
    """Time lost against the interval between checkpoints, with the best one marked."""
    between_s = 86400 * node_days / nodes
    best_s = (2 * save_s * between_s) ** 0.5
    times = np.geomspace(max(10.0, best_s / 30), best_s * 30, 60)
    figure = plot_lines(
        times / 60,
        {"time lost": [100 * min(1, lost(t, save_s, between_s)) for t in times]},
        logx=True,
        markers=False,
        xlabel="minutes between checkpoints",
        ylabel="time lost (%)",
        title=f"a failure every {between_s / 3600:.1f} h: save every {best_s / 60:.0f} min, "
        f"lose {100 * lost(best_s, save_s, between_s):.1f} %",
    )
    figure.axes[0].axvline(best_s / 60, color="black", linestyle="--", linewidth=1)
    return figure


explore(
    save_explorer,
    nodes=[1, 16, 64, 256, 1024, 2048],
    node_days=[50, 100, 250, 1000],
    save_s=[5, 20, 60, 300, 900],
    labels={
        "nodes": "nodes",
        "node_days": "days between failures of a node",
        "save_s": "seconds to save",
    },
    alt="Time lost against the interval between checkpoints: a curve with a minimum",
)

# %% [markdown]
# A shorter save costs less each time, and it lets you save more often. Two ways: sharded saves, of
# which each rank writes its own part, and asynchronous ones (section 5).
#
# ## 5 · A checkpoint is whole or not there
#
# A job that died *while saving* leaves half a file. The next start loads it, or crashes on it. A
# checkpoint must be there whole or not at all: write beside it, flush, rename; keep a checksum; on
# load take the newest **whole** one. And it must hold everything that decides about the next step:
# parameters, optimizer, scheduler, scaler, random numbers, and the sampler's place.

# %%
# %%rank 0
from minidist.checkpoint import Checkpoints


def make_state():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = make_state()
checkpoints = Checkpoints(work / "whole", keep=3)
for step in range(1, 4):
    model(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    checkpoints.save(step, shared={"model": model, "optimizer": optimizer})
files = sorted(path for path in (work / "whole").rglob("*") if path.is_file())
newest = max((p for p in files if p.stat().st_size > 500), key=lambda p: p.stat().st_mtime_ns)
newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])  # a disk that was full
loaded = make_state()
resumed_at = checkpoints.load(shared={"model": loaded[0], "optimizer": loaded[1]})

# %%
# %%rank 0
display(
    claim("the newest checkpoint (step 3) is cut in half; loading takes step", resumed_at, 2),
)

# %% [markdown]
# ### Saved while training goes on
#
# A save of weights and optimizer takes seconds to minutes, and a blocking one stops all GPUs for as
# long.
# [`async_save`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.state_dict_saver.async_save)
# of torch.distributed.checkpoint (DCP) copies the state into CPU memory, returns, and writes the
# copy in a thread. Two ranks now save 64 MiB that they share half and half, first blocking and then
# asynchronously, three times. As soon as `async_save` returns, they do what an optimizer does: they
# change the weights.

# %%
# %%rank 0
wait_guess = predict(
    "async_save keeps training waiting for how much of a blocking save's time?",
    guess=None,
    unit="%",
)
wait_guess

# %% [markdown]
# The thread has collectives of its own to call (who writes what?). On training's group they could
# meet training's all-reduces, in any order. So it gets a group of its own, with gloo.


# %%
# %%rank 0
NUMBERS = 1 << 24  # fp32


def save_both_ways(folder: str, rounds: int) -> list[tuple]:
    """Of each round: seconds of `save`, of `async_save`, and until that one is written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")  # the copy in CPU memory is what is written, on GPUs too
    mesh, own_group = init_device_mesh("cpu", (2,)), dist.new_group(backend="gloo")
    weights = distribute_tensor(torch.arange(NUMBERS, dtype=torch.float32), mesh, [Shard(0)])
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        dcp.save({"weights": weights}, checkpoint_id=f"{folder}/blocking-{number}")
        blocking_s = time.perf_counter() - began
        began = time.perf_counter()
        writing = dcp.async_save(
            {"weights": weights}, checkpoint_id=f"{folder}/async-{number}", process_group=own_group
        )
        waited_s = time.perf_counter() - began
        weights.neg_()  # the next step, while the thread writes
        writing.result()  # before the next save, and before the end of the program
        seconds.append((blocking_s, waited_s, time.perf_counter() - began))
        weights.neg_()
    dist.destroy_process_group()
    return seconds


saved = work / "dcp"
rounds = run(save_both_ways, 2, str(saved), 3, deadline_s=50)[0]
blocking_s, waited_s, written_s = (statistics.median(r[i] for r in rounds) for i in range(3))
waited_share = statistics.median(r[1] / r[0] for r in rounds)
print(f"blocking {blocking_s:.2f} s; async_save {waited_s:.2f} s, written after {written_s:.2f} s")

# %% [markdown]
# What do the files hold, the weights of before or the negated ones? We load them on **three**
# ranks, whose parts have other bounds than those that were saved, and on one.


# %%
# %%rank 0
def load_on_other_ranks(folder: str) -> list[int]:
    """This rank's first and last number, and the number of those that differ from 0, 1, 2, …"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = distribute_tensor(torch.zeros(NUMBERS), mesh, [Shard(0)])
    dcp.load({"weights": weights}, checkpoint_id=folder)  # each rank reads what it needs
    part = weights.to_local()
    wrong = (part.diff() != 1).sum()
    dist.destroy_process_group()
    return [int(part[0]), int(part[-1]), int(wrong)]


parts = {n: run(load_on_other_ranks, n, str(saved / "async-2"), deadline_s=50) for n in (1, 3)}
display(
    wait_guess.reveal(100 * waited_share),
    claim("async_save / blocking save: time that training waits", waited_share, ("<", 0.6)),
    claim(
        "loaded on one rank: first, last, and how many are wrong",
        parts[1][0],
        [0, NUMBERS - 1, 0],
    ),
    claim("loaded on three ranks: how many are wrong", [part[2] for part in parts[3]], [0, 0, 0]),
    claim(
        "... each part begins where the one before ends",
        [parts[3][i + 1][0] - parts[3][i][1] for i in range(2)],
        [1, 1],
    ),
)

# %% [markdown]
# The checkpoint holds the values at the call: everything may change afterwards. The price is a
# second copy of the state in CPU memory. A GPU's state has to cross PCIe before `async_save`
# returns, unless a stager with pinned memory copies beside the next forward pass; then the
# optimizer must wait for the *copy* (`staging_completion`), not for the write.
#
# Two things must wait for `result()`: the end of the program, and **the next save**, which would
# need another copy in memory and another thread. So the interval between saves cannot be shorter
# than a write. In the figure, the times are those that we measured.

# %%
# %%rank 0
gaps_s = np.linspace(0, 2 * written_s, 41)
wait_per_save_s = waited_s + np.maximum(0, written_s - waited_s - gaps_s)
plot_lines(
    gaps_s,
    {"async_save": wait_per_save_s, "blocking": np.full(41, blocking_s)},
    xlabel="seconds of training between two saves",
    ylabel="waiting per save (s)",
    markers=False,
    title="Saved too often, async_save waits, too",
)

# %% [markdown]
# ## 6 · A node is killed, live
#
# Now everything together. Two nodes with one worker each train a small model. torchrun is told
# `--nnodes=1:2`: at least one node, at most two. The script loads the newest checkpoint first; it
# saves one every five steps. The **global batch is the same** at every world size: 12 samples, six
# per rank with two ranks, twelve with one. So the curve must not change.

# %%
# %%rank 0
TRAIN = work / "train.py"
TRAIN.write_text(
    """import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from minidist.checkpoint import Checkpoints
from minidist.data import make_regression
from minidist.device import choose_device
from minidist.elastic import Preemption, restart_count, share_of_batch, train_elastically

folder, num_steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
device = choose_device()
dist.init_process_group("gloo")   # on GPUs too: it notices at once that a peer was killed
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
model = model.to(device, torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs, targets = (t.to(device, torch.float64) for t in make_regression(12 * num_steps, 8, 2))
mine = share_of_batch(12, world_size, rank)
log = folder / f"losses-{restart_count()}-{world_size}.jsonl"

def step(number):
    batch = slice(number * 12 + mine.start, number * 12 + mine.stop)
    loss = (model(inputs[batch]) - targets[batch]).square().sum() / 24   # of the global batch
    optimizer.zero_grad()
    loss.backward()
    total = loss.detach()
    for tensor in [total, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor)                                          # the sum, not the mean
    optimizer.step()
    if rank == 0:
        with log.open("a") as file:
            file.write(json.dumps([number, total.item(), world_size, time.time()]) + "\\n")
    time.sleep(pause)                                                    # something left to kill

with Preemption() as preemption:
    train_elastically(step, num_steps=num_steps, checkpoints=Checkpoints(folder / "checkpoints"),
                      shared={"model": model, "optimizer": optimizer}, every=5,
                      preemption=preemption)
dist.barrier()
dist.destroy_process_group()
"""
)


def rows_of(folder: Path) -> list:
    """(step, loss, world size, time) of every step that was done, repeated ones included."""
    text = [p.read_text() for p in folder.glob("losses-*.jsonl")]
    rows = [json.loads(line) for t in text for line in t.splitlines() if line.endswith("]")]
    return sorted(rows, key=lambda row: row[3])


# %% [markdown]
# After a few steps we kill one whole node, agent and worker, with SIGKILL. The other node has to
# notice, to give up waiting for it, and to load a checkpoint.

# %%
# %%rank 0
back_guess = predict("How many seconds after the kill is the next step done?", guess=None, unit="s")
back_guess

# %% [markdown]
# The job starts, and we wait for twelve steps.

# %%
# %%rank 0
STEPS = 40 if quick else 200
job = work / "job"
job.mkdir(exist_ok=True)
words = ("--nnodes=1:2", "--max-restarts=2", str(TRAIN), str(job), str(STEPS), "0.1")
agents = start_nodes(2, *words)


def wait_for(size: int, num_rows: int, limit_s: float = 300.0) -> None:
    """Until so many steps have been done by so many ranks, or the first agent has ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and agents[0].poll() is None:
        if sum(row[2] == size for row in rows_of(job)) >= num_rows:
            return
        time.sleep(0.1)


wait_for(2, 12)
began_with = rows_of(job)[-1][2]
children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
for pid in [agents[1].pid, *map(int, children)]:
    os.kill(pid, signal.SIGKILL)  # the whole node at once: an agent alone leaves its worker behind
killed_at = time.time()
print(f"killed node 1 after step {rows_of(job)[-1][0]}, with {began_with} ranks")

# %% [markdown]
# Node 0 is alone now. We wait until it ends.

# %%
# %%rank 0
wait_for(1, 1)  # its worker fails; it meets again, alone, and loads the checkpoint
try:
    code = agents[0].wait(300)
finally:
    for agent in agents:
        if agent.poll() is None:
            agent.kill()
rows = rows_of(job)
after = [row for row in rows if row[2] == 1]
back_s = after[0][3] - killed_at if after else float("nan")
print(f"node 0 ended with code {code}; it went on at step {after[0][0]}, {back_s:.1f} s after")

# %% [markdown]
# And the same job without an accident, on one node, for comparison:

# %%
# %%rank 0
calm = work / "calm"
calm.mkdir(exist_ok=True)
command = [*TORCHRUN, "--standalone", str(TRAIN), str(calm), str(STEPS), "0"]
subprocess.run(command, env=QUIET | gpus_of(0, 2), check=True, timeout=300, capture_output=True)
calm_losses = {row[0]: row[1] for row in rows_of(calm)}
final = {row[0]: row[1] for row in rows}  # the last time each step was done

figure, ax = new_figure(8.5, 3.2)
with style():
    zero = rows[0][3]
    for size, colour in ((2, PALETTE[0]), (1, PALETTE[1])):
        part = [row for row in rows if row[2] == size]
        ax.plot(
            [r[3] - zero for r in part],
            [r[0] for r in part],
            "o",
            markersize=3,
            color=colour,
            label=f"{size} node{'s' * (size > 1)}",
        )
    ax.axvline(killed_at - zero, color="black", linestyle="--", linewidth=1)
    ax.annotate(
        "a node is killed", (killed_at - zero, STEPS * 0.9), (6, 0), textcoords="offset points"
    )
    ax.set(
        xlabel="seconds since the first step",
        ylabel="step",
        title="It waits, goes back to the checkpoint, and goes on alone",
    )
    ax.legend(frameon=False, loc="lower right")
figure

# %%
# %%rank 0
display(
    back_guess.reveal(back_s),
    claim("the job began with this many ranks", began_with, 2),
    claim("node 0 ended well", code, 0),
    claim("it went on with one rank, from a multiple of 5 (a checkpoint)", after[0][0] % 5, 0),
    claim("steps that had to be done twice", len(rows) - len(final), ("<", 20)),
    claim("every step was done", sorted(final), list(range(STEPS))),
    claim(
        "losses of the broken job / of the calm one, largest relative difference",
        max(abs(final[i] / calm_losses[i] - 1) for i in calm_losses),
        ("<", 1e-9),
    ),
    claim(
        "shares of a batch of 12 on 3 ranks",
        [s.stop - s.start for s in (share_of_batch(12, 3, r) for r in range(3))],
        [4, 4, 4],
    ),
)

# %% [markdown]
# Node 0's worker was in an all-reduce with a rank that was gone. gloo saw the closed connection,
# and the worker failed ("Connection reset by peer"). Its agent, which watches its own workers only,
# met again, alone, and started a fresh worker, and that one loaded the newest checkpoint. Two waits
# are in between. The rendezvous counts a silent node as lost after
# `keep_alive_interval × keep_alive_max_attempt` (3 s here, 15 s by default), and waits for others
# to join for `last_call_timeout` (5 s here, 30 s by default). Then a new worker has to start and to
# import torch. One more wait comes before them where nobody reports the lost peer, as when a
# machine loses its power or an NCCL kernel waits for a neighbour in shared memory: the worker hangs
# until the collective's timeout.
#
# torchrun restarts workers, and the rest is up to the script. If the batch had shrunk with the
# ranks, so would have the right learning rate. If the checkpoint lacked the optimizer's state, the
# curve would have a kink. A Slurm job that is *requeued* starts again at full size; the script is
# the same.

# %% [markdown]
# ## 7 · A quorum for every step
#
# Section 6 stopped the whole job because of one node: rendezvous, new workers, checkpoint. But data
# parallelism has **copies**. Each *replica group*, one rank or many with a sharded model, holds all
# of the weights. If one is lost, the others have everything they need for the next step. The idea
# is that of [torchft](https://docs.pytorch.org/torchft/). In every step
#
# 1. the groups that report in time are the **quorum** of this step;
# 2. if it is not that of the last step, they connect anew, and who is behind **heals**: it gets
#    weights and moments from a peer, not from a disk;
# 3. gradients are averaged over the quorum; a lost group is left out of the mean;
# 4. they **commit**: all of them take the step, or, if an all-reduce failed anywhere, nobody does.
#
# Each of our groups is one rank. The votes are in a `TCPStore`, in this notebook's process.
# `compare_set` takes the first answer to a question and gives it to all who answer later, so two
# ranks cannot decide differently. In torchft a server, the *lighthouse*, finds the quorum, and only
# the ranks *of a group* commit together: a group that has not taken a step which others took is
# behind, and heals in the next one.

# %%
# %%rank 0
REPLICA = work / "replica.py"
_ = REPLICA.write_text(
    """import io, json, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from minidist.data import make_regression

GROUPS, SHORT, LONG = range(3), timedelta(seconds=1), timedelta(seconds=60)
me, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
votes = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
model = model.double()
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
inputs, targets = (t.double() for t in make_regression(24 * 64, 8, 2))
if me < 0:
    votes.set("ready", "")
    me = int(votes.get("spare"))                 # waits until it is needed

def loss_of(part):
    return (model(inputs[part]) - targets[part]).square().mean()

def all_there(keys, limit):
    try:
        votes.wait(keys, limit)
        return True
    except RuntimeError:                         # not in time
        return False

def decide(question, answer):
    return votes.compare_set(question, "", answer).decode()     # the first answer is everybody's

def quorum(number, last):
    "Groups that take part in a round: those that have reported when all of the last one have."
    votes.set(f"{number}/here/{me}", "")
    if last:                                     # who is new only asks what the others decide
        all_there([f"{number}/here/{g}" for g in last], SHORT if number else LONG)
        here = [g for g in GROUPS if votes.check([f"{number}/here/{g}"])]
        decide(f"{number}/quorum", json.dumps(here))
    return json.loads(votes.get(f"{number}/quorum"))

def connect(number, members, step):
    "A process group of this quorum; who is behind gets the state of a peer."
    store = dist.PrefixStore(f"{number}/group", votes)
    group = dist.ProcessGroupGloo(store, members.index(me), len(members), timedelta(seconds=5))
    steps = [torch.zeros(1, dtype=torch.int64) for _ in members]
    group.allgather([steps], [torch.tensor([step])]).wait()
    newest = int(torch.cat(steps).argmax())
    if min(steps) < max(steps):
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        size = torch.tensor([file.tell()])
        group.broadcast(size, newest).wait()
        state = torch.empty(int(size), dtype=torch.uint8)
        if members[newest] == me:
            state = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        group.broadcast(state, newest).wait()
        weights, moments = torch.load(io.BytesIO(state.numpy().tobytes()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    return group, int(steps[newest])

number = int(votes.get("round"))
last, group, step = ([] if number else list(GROUPS)), None, 0
number += bool(number)                           # the round that runs goes on without us
while step < int(votes.get("stop")):
    members, gradient = quorum(number, last), None
    if me not in members:                        # came too late: ask for the next round
        last, number = [], number + 1
        continue
    try:
        if group is None or members != last:
            group, step = connect(number, members, step)
        first = 24 * (step % 64) + 8 * me
        optimizer.zero_grad()
        loss_of(slice(first, first + 8)).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        group.allreduce([gradient]).wait()
        votes.set(f"{number}/done/{me}", "")
        mine = all_there([f"{number}/done/{g}" for g in members], SHORT)
    except RuntimeError:                         # a peer is gone
        mine = False
    if decide(f"{number}/commit", str(mine)) == "True":
        for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p) / len(members)      # the mean over those who are there
        optimizer.step()
        step += 1
        row = [step, loss_of(slice(0, 256)).item(), len(members), time.time()]
        with (folder / f"{me}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\\n")
    else:
        group = None
    last, number = members, number + 1
    votes.set("round", str(number))
    time.sleep(0.1)                              # a step takes a while
weights = torch.cat([p.detach().flatten() for p in parameters])
(folder / f"{me}.end").write_text(json.dumps(weights.tolist()))
time.sleep(0.5)                                  # a peer may still be in the last step
"""
)

# %% [markdown]
# Three groups train, and a spare process waits with torch imported.

# %%
# %%rank 0
groups = work / "groups"
groups.mkdir(exist_ok=True)
votes = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
votes.set("round", "0")
votes.set("stop", "100000")
LOST = 2  # the group that is killed
LEFT, BACK = (12, 15) if quick else (60, 60)  # steps without the third group, and with the new one


def start_replica(role: int) -> subprocess.Popen:
    command = [sys.executable, str(REPLICA), str(role), str(votes.port), str(groups)]
    env = QUIET | {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE)


def wait_for_steps(condition, limit_s: float = 300.0) -> list:
    """Rows of a group that stays, once they fulfil the condition, or when the time is up."""
    end, log = time.monotonic() + limit_s, groups / f"{(LOST + 1) % 3}.jsonl"
    while True:
        text = log.read_text().splitlines() if log.exists() else []
        steps = [json.loads(line) for line in text if line.endswith("]")]
        if condition(steps) or time.monotonic() > end:
            return steps
        time.sleep(0.05)


replicas = [start_replica(role) for role in (0, 1, 2, -1)]
before_it = len(wait_for_steps(lambda rows: len(rows) >= 15 and votes.check(["ready"])))
print(f"{before_it} steps, and a spare")

# %% [markdown]
# Now we kill group 2 with SIGKILL, in the middle of whatever it does. Twelve steps later the spare
# takes its place. It knows nothing but the first, random weights.

# %%
# %%rank 0
still_guess = predict(
    "For how many seconds do the other two stand still when one is killed?", guess=None, unit="s"
)
still_guess

# %%
# %%rank 0
try:
    replicas[LOST].kill()
    wait_for_steps(lambda rows: sum(row[2] == 2 for row in rows) >= LEFT)
    votes.set("spare", str(LOST))
    back_at = wait_for_steps(lambda rows: len(rows) > before_it + LEFT and rows[-1][2] == 3)[-1][0]
    votes.set("stop", str(back_at + BACK))
    ended = [replicas[i].wait(30) for i in range(4) if i != LOST]
finally:
    for replica in replicas:
        if replica.poll() is None:
            replica.kill()
kept_steps = wait_for_steps(lambda rows: True)
final_weights = [json.loads((groups / f"{g}.end").read_text()) for g in range(3)]
still_s = float(np.diff([row[3] for row in kept_steps]).max())
print(f"{len(kept_steps)} steps, the longest pause {still_s:.1f} s; exit codes {ended}")

# %% [markdown]
# Beside it, the run without an accident: one process, and always the mean of three groups.


# %%
# %%rank 0
def unbroken(steps: int) -> list[float]:
    """Loss after each step with all three groups, computed as in the script."""
    from minidist.data import make_regression

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    net = net.double()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x, y = (t.double() for t in make_regression(24 * 64, 8, 2))
    found = []
    for step in range(steps):
        part = slice(24 * (step % 64), 24 * (step % 64) + 24)
        adam.zero_grad()
        (net(x[part]) - y[part]).square().mean().backward()
        adam.step()
        found.append((net(x[:256]) - y[:256]).square().mean().item())
    return found


whole = unbroken(len(kept_steps))
curve = [row[1] for row in kept_steps]
alone = [row[0] for row in kept_steps if row[2] == 2]
figure = plot_lines(
    range(1, len(curve) + 1),
    {"one lost, one back": curve, "unbroken": whole},
    logy=True,
    markers=False,
    xlabel="step (shaded: two groups of three)",
    ylabel="loss",
    title="The others go on, and the third comes back",
)
figure.axes[0].axvspan(alone[0] - 0.5, alone[-1] + 0.5, color="#EEEEEE", zorder=0)
figure

# %%
# %%rank 0
display(
    still_guess.reveal(still_s),
    claim(
        "every step was taken, and none twice",
        [row[0] for row in kept_steps],
        list(range(1, len(curve) + 1)),
    ),
    claim(
        "steps with all three: largest relative difference from one process",
        max(abs(curve[i] / whole[i] - 1) for i in range(alone[0] - 1)),
        ("<", 1e-9),
    ),
    claim("steps with two groups", len(alone), (">=", LEFT)),
    claim(
        "the three groups' weights at the end are equal, bit by bit",
        all(weights == final_weights[0] for weights in final_weights),
        True,
    ),
    claim("loss at the end / unbroken", curve[-1] / whole[-1], 1.0, rtol=0.3),
)

# %%
# %%rank 0
claim("restart of section 6 / this pause", back_s / still_s, (">", 2))

# %% [markdown]
# While a group is missing, a batch has a third fewer samples, so the curve differs a little, as
# with another order of the data. The pause is mostly the time limit after which a silent group
# counts as lost: one second here.
#
# What does it buy? Let everybody stand still for q seconds per failure, let a group be missing for
# R seconds, and let there be G groups. Then the share of time that is lost is $q/M + R/(G M)$, and
# no checkpoint is in it. Llama 3's job had 128 data-parallel groups of 16 nodes. They shared the
# optimizer's state (FSDP), so none of them was a copy. What if each had been one?


# %%
# %%rank 0
def lost_with_quorum(between_s: float, groups: int, still_s: float = 10.0, back_s: float = 300.0):
    return still_s / between_s + back_s / (groups * between_s)


sizes = np.array([64, 256, 1024, 2048, 4096, 8192])
apart_s = 86400 * node_days / sizes
ways = {
    f"restart, a save takes {save_s} s": [
        100 * lost((2 * save_s * m) ** 0.5, save_s, m) for m in apart_s
    ]
    for save_s in (60, 5)
}
ways["a quorum per step"] = [
    100 * lost_with_quorum(m, n // 16) for m, n in zip(apart_s, sizes, strict=True)
]
at_llama = {name: values[3] for name, values in ways.items()}
display(
    claim(
        "lost by 2,048 nodes, %: restart with 60 s and 5 s per save, quorum",
        list(at_llama.values()),
        [13.1, 5.7, 0.11],
        rtol=0.03,
    ),
    claim(
        "Llama 3 405B, 8,192 tokens: groups of 16 nodes (tensor 8 × pipeline 16)",
        128,
        status="cited",
        authority="The Llama 3 Herd of Models, arXiv 2407.21783, table 4",
    ),
)
plot_lines(
    sizes,
    ways,
    logx=True,
    logy=True,
    ticks=list(sizes),
    xlabel="nodes of 8 GPUs, each of which fails every 264 days",
    ylabel="time lost (%)",
    title="Copies in memory cost less than copies on disk",
)

# %% [markdown]
# The gain needs copies: with pure ZeRO-3 over all ranks there is only one group, so use HSDP
# (lecture 5). And a checkpoint now and then stays necessary, since the lighthouse, the power or the
# code can fail for all at once.
#
# ## 8 · Loss spikes, and memory that lies
#
# A crash is honest. A GPU that computes wrongly is not: 6 of the 419 interruptions of Llama 3 were
# **silent data corruption**. The loss curve shows some of it as a **spike**; other spikes come from
# the data that the weights meet. PaLM's cure was to go back about 100 steps before the spike and to
# skip a few hundred batches ([arXiv 2204.02311](https://arxiv.org/abs/2204.02311)). A broken GPU it
# does not cure. Which one is broken?
#
# Data parallelism has the answer almost for free. Replicas are equal **bit by bit**, so their
# checksums are, too. Every five steps each of four ranks adds up its weights' bits, and the 8 bytes
# are gathered. We flip one bit of one weight of rank 2, before step 13.

# %%
# %%rank 0
flip_guess = predict(
    "A flipped low bit of one weight changes the loss of 30 steps by at most", guess=None, unit="%"
)
flip_guess


# %%
# %%rank 0
def train_with_flip(where: str, bit: int, every: int = 5, flip_at: int = 12) -> tuple:
    """Losses of 30 steps, and the step and the ranks that the checksums name."""
    from minidist.data import make_regression

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    adam, weights = torch.optim.AdamW(net.parameters(), lr=1e-2), list(net.parameters())
    x, y = make_regression(8 * world_size * 30, 8, 2)
    losses, named = [], None

    def flip(tensor) -> None:
        tensor.detach().view(torch.int32).view(-1)[3] ^= 1 << bit

    for step in range(30):
        is_hit = step == flip_at and rank == 2
        if is_hit and where == "weight":
            flip(net[2].weight)
        first = 8 * (step * world_size + rank)
        loss = (net(x[first : first + 8]) - y[first : first + 8]).square().mean()
        adam.zero_grad()
        loss.backward()
        flat = torch.cat([loss.detach().view(1), *(p.grad.view(-1) for p in weights)])
        if is_hit and where == "gradient":
            flip(flat[1:])
        dist.all_reduce(flat)
        flat /= world_size
        losses.append(flat[0].item())
        for p, grad in zip(weights, flat[1:].split([p.numel() for p in weights]), strict=True):
            p.grad = grad.view_as(p)
        adam.step()
        if (step + 1) % every == 0 and named is None:
            bits = torch.cat([p.detach().view(-1) for p in weights]).view(torch.int32).long()
            mine = (bits * torch.arange(1, len(bits) + 1)).sum()  # 8 bytes, modulo 2^64
            every_rank = [torch.zeros_like(mine) for _ in range(world_size)]
            dist.all_gather(every_rank, mine)
            sums = [int(each) for each in every_rank]
            odd = [r for r, each in enumerate(sums) if 2 * sums.count(each) <= world_size]
            named = (step + 1, odd) if odd else None
    return losses, named


flips = {
    "no flip": ("", 0),
    "lowest bits": ("weight", 2),
    "exponent": ("weight", 24),
    "gradient": ("gradient", 24),
}
hit = {name: run(train_with_flip, 4, *how, deadline_s=50)[0] for name, how in flips.items()}
grown = {
    name: [100 * (a / b - 1) for a, b in zip(losses, hit["no flip"][0], strict=True)]
    for name, (losses, _) in hit.items()
}
display(
    flip_guess.reveal(max(map(abs, grown["lowest bits"]))),
    claim(
        "a low bit: largest change of the loss, %", max(map(abs, grown["lowest bits"])), ("<", 0.01)
    ),
    claim("... after step 15 the checksums name", hit["lowest bits"][1], (15, [2])),
    claim("a bit of the exponent: the loss rises by, %", max(grown["exponent"]), (">", 20)),
    claim("... the checksums name", hit["exponent"][1], (15, [2])),
    claim("without a flip they name nobody", hit["no flip"][1] is None, True),
    claim(
        "a flipped gradient, before it is averaged: they name nobody",
        hit["gradient"][1] is None,
        True,
    ),
)
plot_lines(
    range(1, 31),
    {name: grown[name] for name in ("exponent", "lowest bits")},
    xlabel="step",
    ylabel="loss, against no flip (%)",
    markers=False,
    title="One bit: a spike, or nothing to see",
)

# %% [markdown]
# Rank 2, between steps 11 and 15. Its gradients of those steps went into everybody's weights. So
# the node is taken out, and the others go back to a checkpoint of step 10 or before. Three ranks
# are needed for a majority. A wrong *gradient* is averaged into all replicas alike, and checksums
# do not see it: for that, some jobs compute the same batch twice now and then on two GPUs.
#
# What does a check cost? It reads the weights once, and sends 8 bytes per rank.

# %%
# %%rank 0
read_s = 2 * cost.LLAMA3_8B.num_parameters / cost.H100.memory_bandwidth_bytes_per_s
display(
    claim(
        "Llama 3 8B in bf16 on an H100: reading all weights takes, ms", 1e3 * read_s, 4.8, rtol=0.02
    ),
    claim(
        "interruptions of Llama 3's training by silent data corruption",
        6,
        status="cited",
        authority="The Llama 3 Herd of Models, arXiv 2407.21783, table 5",
    ),
)

# %% [markdown]
# ## Now you
#
# Put section 4 and the first figure together. Write a function that gives the **largest number of
# nodes** whose job loses at most a given share of its time, if it saves at the best interval. One
# node fails once in `node_days` days; a save takes `save_s` seconds, and a restart 300. The cell
# after it tries your function on twenty clusters.


# %%
def most_nodes(node_days: float, save_s: float, share: float) -> int | None:
    """Your turn. `lost(interval_s, save_s, between_s)` is the share of time that is lost."""
    return None


# %%
# %%rank 0
def lost_by(nodes: int, node_days: float, save_s: float) -> float:
    between_s = 86400 * node_days / nodes
    return lost((2 * save_s * between_s) ** 0.5, save_s, between_s)


def check(answer) -> str:
    dice = np.random.default_rng(0)
    for _ in range(20):
        node_days, save_s, share = (
            dice.uniform(50, 500),
            dice.uniform(5, 300),
            dice.uniform(0.02, 0.2),
        )
        case = f"{node_days:.0f} days, {save_s:.0f} s, {100 * share:.1f} %"
        nodes = answer(node_days, save_s, share)
        if nodes is None:
            return "Not written yet."
        if not isinstance(nodes, int | float | np.number) or not 1 <= nodes < math.inf:
            return f"{case}: {nodes} is no number of nodes."
        if nodes != int(nodes):
            return f"{case}: {nodes:.2f} nodes? Whole ones only."
        if lost_by(nodes, node_days, save_s) > share:
            return f"{case}: {nodes} nodes lose {100 * lost_by(nodes, node_days, save_s):.1f} %."
        if lost_by(nodes + 1, node_days, save_s) <= share:
            return f"{case}: more than {nodes} nodes are possible."
    return "Right, in all 20 cases."


def one_answer(node_days: float, save_s: float, share: float) -> int:
    nodes = 1
    while lost_by(nodes + 1, node_days, save_s) <= share:
        nodes += 1
    return nodes


print(check(most_nodes))
display(
    claim("counting nodes up", check(one_answer), "Right, in all 20 cases."),
    claim(
        "one node too many", check(lambda *of: one_answer(*of) + 1), lambda got: "nodes lose" in got
    ),
    claim("one node", check(lambda *of: 1), lambda got: "are possible" in got),
    claim("half a node", check(lambda *of: one_answer(*of) + 0.5), lambda got: "Whole" in got),
    claim("no number", check(lambda *of: math.nan), lambda got: "no number" in got),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# With n nodes `between_s = 86400 * node_days / n`, and the best interval is
# `(2 * save_s * between_s) ** 0.5`. Count n up from 1 as long as `lost` of that interval is at most
# `share`. The share grows with n, so the first failure ends the search.
#
# </details>
#
# ## Summary
#
# - torchrun: one agent per node, one worker per GPU. Slurm: one task per node. `LOCAL_RANK` chooses
#   the GPU.
# - A rendezvous needs one address that all can reach, one id, and the right number of nodes. Give
#   it a limit.
# - Networks: divide Gbit/s by 8, and by the GPUs that share a port. Latency counts per message.
# - A hang is a collective that somebody did not call. The flight recorder says who, and where.
# - Save every √(2 · save time · time between failures); whole or not at all; everything that
#   decides.
# - `async_save` returns when the state is copied. The next save waits until it is written.
# - Keep the global batch when the number of ranks changes.
# - Replica groups are copies: with a quorum in every step, a lost group costs a pause and not a
#   restart, and comes back from a peer's memory.
# - Replicas are equal bit by bit; checksums name the rank whose memory has failed.
#
# ## Questions
#
# 1. 16,384 GPUs, one failure in 3 hours, a save takes 10 minutes. How often do you save, and what
#    should you do first?
#
# <details><summary>Answer</summary>
#
# √(2 · 600 · 10,800) s = 60 minutes, and 10/60 + 60/360 = a third of the time is lost, besides
# restarts. First make saving faster: sharded and asynchronous. With 10 s it is 8 minutes and about
# 4 %.
#
# </details>
#
# 2. Every rank prints "collective timeout" except rank 5. What do you look at?
#
# <details><summary>Answer</summary>
#
# Rank 5. It never called that collective: it computes (a huge batch?), waits for a disk, is in
# another collective, or has died in silence. Its stack and its flight recorder tell which.
#
# </details>
#
# 3. The job works on one node and hangs in `init_process_group` on two. Name three causes.
#
# <details><summary>Answer</summary>
#
# A firewall between the nodes; the wrong network interface (set `NCCL_SOCKET_IFNAME` or
# `GLOO_SOCKET_IFNAME`); a head node that knows itself as 127.0.0.1; `--nnodes` larger than what was
# started; two nodes with the same `--node-rank`.
#
# </details>
#
# 4. Why does `kill -9` of torchrun not end a node's work?
#
# <details><summary>Answer</summary>
#
# SIGKILL cannot be caught, so the agent does not end its workers. They go on, hold their GPUs, and
# may even write checkpoints. Kill the process group, or let Slurm or the container do it.
#
# </details>
#
# 5. After a restart with half of the ranks the loss jumps. What was forgotten?
#
# <details><summary>Answer</summary>
#
# Usually the global batch (the mean over ranks is taken over other samples, or the learning rate no
# longer fits), the optimizer's state, or the sampler's place: the job trains on other data.
#
# </details>
#
# 6. Training calls `async_save` every 30 s, and a write takes 45 s. What happens, and what helps?
#
# <details><summary>Answer</summary>
#
# Each save waits 15 s for the one before. Save less often, write faster (sharded: more ranks, each
# with a smaller part), or save where it is near, such as a local disk or a neighbour's memory.
#
# </details>
#
# 7. In torchft the ranks of a group commit a step together, and the groups need not agree. Why is
#    that enough?
#
# <details><summary>Answer</summary>
#
# The ranks of a group hold different parts of one model. If some took the step and others did not,
# its weights would be those of two steps. Groups hold whole copies, and each counts its steps: who
# has fewer than the others is behind, and heals.
#
# </details>
#
# ## Try it
#
# - In section 7 set `LOST = 0`. What would be needed if all three were killed?
# - In section 6 set `every=1`, then `every=20`. How many steps are done twice?
# - In section 3 let rank 2 call a broadcast instead of nothing. What does the recorder say?
# - Kill only the agent of node 1 (and then find its worker, and end it).
#
# Then do it yourself in [**lab5_multinode**](../labs/lab5_multinode/lab5_multinode.ipynb): launch,
# save, lose a rank, and go on. In the bonus notebook
# [**bonus_elastic**](../labs/bonus_elastic/bonus_elastic.ipynb) you write all of section 6: shares,
# a sampler that goes on with other ranks, a step that all can load, sharded state cut anew, and a
# script whose curve is the same whoever is killed.
#
# ## What to read
#
# - *The Llama 3 Herd of Models*, section 3.3.4 (reliability),
#   [arXiv 2407.21783](https://arxiv.org/abs/2407.21783)
# - *MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs*,
#   [arXiv 2402.15627](https://arxiv.org/abs/2402.15627)
# - *Bamboo: Making Preemptible Instances Resilient for Affordable Training of Large DNNs*,
#   [arXiv 2204.12013](https://arxiv.org/abs/2204.12013)
# - *PaLM: Scaling Language Modeling with Pathways*, section 5.1 (loss spikes),
#   [arXiv 2204.02311](https://arxiv.org/abs/2204.02311)
# - *Check-N-Run: a Checkpointing System for Training Deep Learning Recommendation Models*,
#   [arXiv 2010.08679](https://arxiv.org/abs/2010.08679)
# - John W. Young, *A first order approximation to the optimum checkpoint interval*,
#   [Communications of the ACM 17 (1974)](https://doi.org/10.1145/361147.361115)
# - PyTorch: [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html),
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)
#   and its [tutorial on async_save](https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html),
#   [torchft](https://docs.pytorch.org/torchft/),
#   [Flight Recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html);
#   Slurm: [sbatch](https://slurm.schedmd.com/sbatch.html)
# - In `lib/minidist/`: `elastic.py`, `checkpoint/store.py`, `profile/flight.py`
