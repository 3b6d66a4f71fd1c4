# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: torchrun × 4
#     language: python
#     name: torchrun-4
# ---

# %% [markdown]
# # Lab 5 · Several nodes
#
# One machine (a *node*) holds 8 GPUs, as a rule. For more you need more nodes, and three things
# change. Somebody has to start processes on every node, and they have to find each other. The
# network between nodes is about ten to forty times slower than the links inside one. And the more
# nodes there are, the more often one of them fails: a job on thousands of GPUs has to go on after a
# failure, or it does not get to its end. In this lab you take care of all three.
#
# **When you have finished, you can**
#
# - turn node rank and local rank into a global rank and back, and start a job on any number of
#   nodes (task 1);
# - pick the network card that training must use, and tell gloo and NCCL (task 2);
# - write checkpoints that survive a crash, a full disk and a flipped bit (task 3);
# - save everything that decides the next step, so that a resumed run is the same run, bit for bit
#   (task 4);
# - write a training script for several nodes, kill a node, and get the same loss curve (task 5);
# - measure the latency and the bandwidth of a link (task 6);
# - write an all-reduce that sends a fraction of the data over the slow link (task 7).
#
# Plan 4 to 5 hours, in two sittings: tasks 3 and 5 are half of it. You should have done lab 1.
# Lecture 10 has the theory. You need neither a second machine nor a GPU: nodes are played by
# separate groups of processes on yours.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | all |
# |---|---|---|---|---|---|---|---|---|
# | points | 12 | 6 | 26 | 14 | 14 | 8 | 20 | 100 |
#
# Without resuming (1 of node_resumes, node_lost) this lab gives at most 49 points.
#
# This notebook runs on **4** ranks: think of two nodes with two GPUs each. Checks use practice data
# here; your grade comes from the same checks with other data on **6** ranks, as two nodes of three
# or three nodes of two. Every task stands alone: if one of them does not work yet, go on with the
# next. What is going to be killed never runs on the notebook's own ranks: scripts are written to
# disk, and started as processes of their own.

# %% [markdown]
# ## The idea in one picture
#
# ```
#         node 0  (node rank 0)                        node 1  (node rank 1)
#   ┌───────────────────────────────┐            ┌───────────────────────────────┐
#   │ torchrun: the agent           │ rendezvous │ torchrun: the agent           │
#   │   hosts the meeting point ◄───┼────────────┼───  --rdzv-endpoint=node0:port│
#   │                               │            │                               │
#   │ rank 0        rank 1          │            │ rank 2        rank 3          │
#   │ local 0 ════ local 1          │            │ local 0 ════ local 1          │
#   └────╫──────────────────────────┘            └────╫──────────────────────────┘
#        ║         NVLink: 450 GB/s inside            ║
#        ╚════════════════════════════════════════════╝
#             network: 12 to 50 GB/s per card between nodes
#
#   checkpoint ─► file system that both nodes see ─► a node dies ─► the job starts again
# ```
#
# An *agent* is one torchrun process per node. The agents meet, count the nodes, give out ranks,
# and each starts the processes of its own node. From then on your script runs, and all it knows
# of the outside world are a few environment variables.

# %% given="imports"
import contextlib
import copy
import io
import ipaddress
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder import check, is_not_started
from minidist.device import (
    all_gather_single,
    choose_backend,
    choose_device,
    ignore_renaming_warnings,
    reduce_scatter_single,
)
from minidist.launch import free_port
from minidist.processes.tree import descendants

# %% tags=["script-only"]
# isort: split
import jupytext

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"
ignore_renaming_warnings()


@contextlib.contextmanager
def demo(needs: str) -> Iterator[None]:
    """Runs a demonstration; says so if a task that it needs has not been done yet."""
    try:
        yield
    except Exception as error:
        if not is_not_started(error):
            raise
        if IS_RANK_ZERO:
            print(f"Nothing to see yet: do {needs} first.")


def show(draw: Callable, width: float = 7.5, height: float = 2.8) -> None:
    """Shows in the notebook, from rank 0 only, what `draw(axes)` draws."""
    if not IS_RANK_ZERO or "ipykernel" not in sys.modules:
        return
    from IPython.display import Image, display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots())
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    display(Image(png.getvalue()))


def setup() -> tuple[int, int, torch.device]:
    """Joins the process group, as in lab 1: (rank, world_size, device)."""
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(choose_backend())
    return dist.get_rank(), dist.get_world_size(), device


rank, world_size, device = setup()

# %% tags=["script-only"]
# Only when this file runs as a script under torchrun: the notebook's %%writefile cells are comments
# here, so rank 0 writes these files now, into a new folder, and all ranks work there.
LAB_FILE = Path(__file__).resolve()
where = [tempfile.mkdtemp(prefix="lab5_multinode_")] if IS_RANK_ZERO else [None]
dist.broadcast_object_list(where, src=0)
os.chdir(where[0])
sys.path.insert(0, where[0])
if IS_RANK_ZERO:
    for cell in jupytext.read(LAB_FILE).cells:
        lines = [line for line in cell.source.splitlines() if not line.startswith("%%rank ")]
        for number, line in enumerate(lines):
            if cell.cell_type == "code" and line.startswith("%%writefile "):
                Path(line.split()[1]).write_text("\n".join(lines[number + 1 :]) + "\n")
dist.barrier()

# %% [markdown]
# ## Task 1 · Who is where
#
# **Why.** Three numbers say who a process is. `LOCAL_RANK` counts the processes of one node: it
# picks the GPU. The node rank (torchrun calls it `GROUP_RANK`) counts the nodes. `RANK` counts all
# processes: it picks the data, and rank 0 is the one that writes. Ranks count up node by node:
# node 0 has the first ones, node 1 goes on where node 0 has stopped. A script that takes
# `LOCAL_RANK` for `RANK` works on one node, where they are the same, and fails on two.
#
# Nodes need not be equally large. So let `local_sizes` be the list of how many processes each node
# has, in the order of node ranks: `[4, 4]` for two nodes of four, `[8, 8, 2]` for three.
#
# **Write `locate(rank, local_sizes)`** and **`global_rank(node_rank, local_rank, local_sizes)`**.
#
# - `locate` returns `(node_rank, local_rank)`, two `int`s; `global_rank` returns the rank.
# - They undo each other.
#
# <details><summary>Hint 1: equal nodes</summary>
#
# With $L$ processes on every node it is a division: node rank `rank // L`, local rank `rank % L`.
# Unequal nodes have no such $L$.
# </details>
#
# <details><summary>Hint 2: unequal nodes</summary>
#
# How many ranks lie on the nodes before node $k$? `sum(local_sizes[:k])`. To locate a rank, walk
# through the nodes and take away each one's size, until what is left fits.
# </details>


# %% solution="task1_places"
def locate(rank: int, local_sizes: list[int]) -> tuple[int, int]:
    """(node_rank, local_rank) of a rank, on nodes that have `local_sizes` processes."""
    ### BEGIN SOLUTION
    left = rank
    for node_rank, size in enumerate(local_sizes):
        if left < size:
            return node_rank, left
        left -= size
    raise ValueError(f"there is no rank {rank} on nodes of {local_sizes} processes")
    ### END SOLUTION


def global_rank(node_rank: int, local_rank: int, local_sizes: list[int]) -> int:
    """The rank of the process `local_rank` of node `node_rank`."""
    ### BEGIN SOLUTION
    return sum(local_sizes[:node_rank]) + local_rank
    ### END SOLUTION


# %% demo="see_places"
with demo("the first half of task 1"):
    places = [locate(r, [4, 3]) for r in range(7)]
    back = [global_rank(*place, [4, 3]) for place in places]
    if IS_RANK_ZERO:
        print("rank          ", *(f"{r:6}" for r in range(7)))
        print("nodes of 4, 3 ", *(f"{place!s:>6}" for place in places))
        print(f"and back: {back}  (expected 0 to 6)")

# %% check="node_places"
check("node_places", (locate, global_rank))

# %% [markdown]
# Every node runs torchrun once. A person does that in two terminals, Slurm's `srun` does it on a
# thousand nodes. All agents need the same picture of the job:
#
# | option | what it says | the same on all nodes? |
# |---|---|---|
# | `--nnodes` | how many nodes | yes |
# | `--nproc-per-node` | processes on *this* node | usually |
# | `--rdzv-backend=c10d` | meet at a store that one agent hosts, with no other server | yes |
# | `--rdzv-endpoint=HOST:PORT` | where to meet: node 0's address, seen from all nodes | yes |
# | `--rdzv-id` | which job this is, should two jobs come to the same place | yes |
# | `--max-restarts` | how often workers are started again after one has failed | yes |
#
# The meeting is called *rendezvous*. With c10d the agents find out their node ranks there. The
# older form has no rendezvous backend: `--node-rank`, `--master-addr` and `--master-port` say
# it all by hand, and the node rank is another one on every node. Both are right here.
#
# **Write `node_command(…)`**: torchrun's command for one node.
#
# - A list of `str`, one per word, as `subprocess.run` wants it; the first is `torchrun`.
# - The options first, then `script`: the script's file and its own arguments. What comes after the
#   file belongs to the script.
# - `local_size` is the number of processes on this node, `head` the address of node 0.
#
# <details><summary>Hint: one word or two</summary>
#
# `f"--nnodes={num_nodes}"` is one word. `"--nnodes 2"` with a blank inside is one word too, and
# torchrun knows no option of that name.
# </details>


# %% solution="task1_command"
def node_command(
    script: list[str],
    *,
    num_nodes: int,
    local_size: int,
    node_rank: int,
    head: str,
    port: int,
    run_id: str,
    max_restarts: int = 0,
) -> list[str]:
    """The torchrun command of node `node_rank` of a job, as a list of words."""
    ### BEGIN SOLUTION
    # node_rank is not needed: with c10d the agents agree on it when they meet.
    return [
        "torchrun",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={local_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{port}",
        f"--rdzv-id={run_id}",
        f"--max-restarts={max_restarts}",
        *script,
    ]
    ### END SOLUTION


# %% demo="see_command"
with demo("task 1"):
    for node in range(2 if IS_RANK_ZERO else 0):
        words = node_command(
            ["train.py", "--lr=0.1"],
            num_nodes=2,
            local_size=4,
            node_rank=node,
            head="192.168.1.100",
            port=29500,
            run_id="lab5",
        )
        print(f"node {node}$", " ".join(words))

# %% check="node_command"
check("node_command", node_command)

# %% [markdown]
# **On real hosts** you would now type one command per terminal. Under Slurm it is one file:

# %% given="write_sbatch" tags=["active-ipynb"]
# %%rank 0
# %%writefile train.sbatch
# #!/bin/bash
# #SBATCH --job-name=lab5
# #SBATCH --nodes=2
# #SBATCH --ntasks-per-node=1
# #SBATCH --cpus-per-task=16
# #SBATCH --gpus-per-node=8
# #SBATCH --time=04:00:00
# #SBATCH --requeue
# # One task per node: torchrun. It starts one process per GPU itself.
# # After a node has failed, Slurm runs this file again (--requeue), and the job goes on from its
# # newest checkpoint. The checkpoints must lie on a file system that all nodes see.
#
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export OMP_NUM_THREADS=2
# export NCCL_SOCKET_IFNAME==ib0  # the second = is meant: this name and no other
# export GLOO_SOCKET_IFNAME=ib0
#
# srun torchrun \
#     --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 \
#     --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \
#     train_node.py --data "$SCRATCH/data.npz" --out "$SCRATCH/out.npz" \
#     --checkpoints "$SCRATCH/checkpoints" --steps 100000 --every 500 --batch-size 512 --lr 0.1

# %% [markdown]
# `sbatch train.sbatch` starts it. Change the paths, the name of the network card and the number of
# GPUs first.
#
# ## Task 2 · The right network card
#
# **Why.** A node has several network interfaces: `lo` (to itself), one for people to log in, one
# that Docker made up, and a fast one for training. Left alone, gloo and NCCL guess. A wrong guess
# shows late and says little: a hang, `Connection refused`, or training at a tenth of the speed. Two
# variables end the guessing.
#
# - `GLOO_SOCKET_IFNAME=NAME`: gloo uses that interface.
# - `NCCL_SOCKET_IFNAME=NAME`: NCCL uses every interface whose name *begins* like that, so `eth1`
#   also admits `eth10`. `=NAME`, with an equals sign as its first character, means that name alone.
#   (InfiniBand's data takes another way, but NCCL's first contact goes through this one.)
#
# Which name is right? An interface has addresses such as `10.3.0.7/16`: the first 16 bits are the
# network. If the other node's address begins with the same 16 bits, this interface leads there.
#
# **Write `network_env(interfaces, peer)`.**
#
# - `interfaces`: name → list of addresses with prefix length, of IPv4 or IPv6, as in
#   `{"lo": ["127.0.0.1/8"], "ib0": ["10.3.0.7/16"]}`. `peer`: the address of node 0.
# - Return the two variables as a `dict`, for the interface whose network holds `peer`. If several
#   do, the narrowest network (the longest prefix) wins.
# - On node 0 itself, `peer` is its own address. The rule is the same.
# - If no interface leads there, raise a `ValueError`: better than a hang.
#
# <details><summary>Hint: addresses</summary>
#
# `ipaddress.ip_interface("10.3.0.7/16").network` is the network, and
# `ipaddress.ip_address(peer) in network` asks the question. An IPv4 address lies in no IPv6
# network. `network.prefixlen` is the length.
# </details>


# %% solution="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface which leads to `peer`."""
    ### BEGIN SOLUTION
    address = ipaddress.ip_address(peer)
    leads_there = [
        (network.prefixlen, name)
        for name, addresses in interfaces.items()
        for network in (ipaddress.ip_interface(text).network for text in addresses)
        if address in network
    ]
    if not leads_there:
        raise ValueError(f"no interface of {sorted(interfaces)} leads to {peer}")
    _, name = max(leads_there)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    ### END SOLUTION


# %% demo="see_network"
def interfaces_here() -> dict[str, list[str]]:
    """This machine's interfaces, if it has the command `ip`."""
    if shutil.which("ip") is None:
        return {"lo": ["127.0.0.1/8"]}
    listed = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, timeout=20)
    return {
        interface["ifname"]: [f"{a['local']}/{a['prefixlen']}" for a in interface["addr_info"]]
        for interface in json.loads(listed.stdout or "[]")
        if interface["addr_info"]
    } or {"lo": ["127.0.0.1/8"]}


with demo("task 2"):
    if IS_RANK_ZERO:
        print("this machine:", interfaces_here())
        print("to 127.0.0.1:", network_env(interfaces_here(), "127.0.0.1"))
        print("(expected: lo, which is all that two nodes on one machine need)")

# %% check="node_interface"
check("node_interface", network_env)

# %% check="node_nccl"
check("node_nccl", network_env)

# %% [markdown]
# ## Task 3 · Checkpoints that survive
#
# **Why.** Meta trained Llama 3 405B on 16,384 GPUs. In 54 days of it there were 419 unexpected
# interruptions, one every three hours. A job survives them through its checkpoints, and so these
# must survive, too. What `torch.save(state, "checkpoint.pt")` writes does not:
#
# | what happens | what is left | what helps |
# |---|---|---|
# | death in the middle of a save | half a file | another name, then `os.replace` |
# | a power cut just after it | a name without data | `os.fsync` before the rename |
# | a bit flips on the disk | wrong numbers; `torch.load` is silent | a checksum in the file |
# | the newest is damaged | nothing, if it is the only one | keep the last k, take the one before |
#
# Your code goes into a file, `checkpointing.py`, because the training script of task 5 imports it.
# Keep the first two lines of the cell.
#
# **Write `save_checkpoint(folder, step, state, keep=3)`.**
#
# - The checkpoint is one file, `FOLDER/step-00000012.ckpt` for step 12: eight digits. Make the
#   folder if it is not there. Return the path.
# - A file of that name is always complete, whenever the process is killed in a save: in the middle
#   of a write, before any call that opens, renames or deletes a file, or after any that has changed
#   one. That also holds if a checkpoint of the same step is there already: at any time there is the
#   old one or the new one.
# - What is not complete has a name of another form: no `step-….ckpt`.
# - Write nothing outside of `folder`: from another disk, a file that is moved gets copied.
# - The data are on the disk (`os.fsync`) before the file gets its name.
# - Afterwards the `keep` highest steps are left, and older ones are deleted, but none before the
#   new one has its name. Files of other names are none of its business. What an earlier death
#   has left behind must not get in the way: not of the next save of the same step either.
#
# **Write `load_newest(folder)`.**
#
# - `(step, state)` of the highest step whose file is whole, with tensors on the CPU; `None` if
#   there is none, or no folder.
# - A file that was changed, cut off or emptied is passed over. It never raises and never gives a
#   state that differs from what was saved.
#
# What is *in* the file is up to you, and so are helpers. `state` holds tensors, numbers, text,
# `None`, lists, tuples and dicts.
#
# <details><summary>Hint 1: a checksum in the same file</summary>
#
# `torch.save(state, buffer)` with `buffer = io.BytesIO()` gives you the bytes.
# `hashlib.sha256(data).digest()` is 32 bytes long: write it first, the data after it.
# </details>
#
# <details><summary>Hint 2: fsync</summary>
#
# A Python file has a buffer of its own. `file.flush()` hands it to the kernel, and
# `os.fsync(file.fileno())` makes the kernel write it out. Both, in this order, before the rename.
# Careful people then fsync the folder too: a new name is data of the folder.
# </details>
#
# <details><summary>Hint 3: the temporary name</summary>
#
# In the same folder: a rename works only within one file system. `step-00000012.ckpt.tmp` does not
# end with `.ckpt`, so `glob("step-*.ckpt")` does not find it.
# </details>

# %% solution="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# """Checkpoints that survive the death of a process, of a node, and of a few bits."""
#
# import hashlib
# import io
# import os
# from pathlib import Path
#
# import torch
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     """Saves `state` as FOLDER/step-00000012.ckpt, whole or not at all; returns the path.
#
#     Then deletes the oldest checkpoints, so that the newest `keep` are left.
#     """
#     ### BEGIN SOLUTION
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     path = folder / f"step-{step:08d}.ckpt"
#
#     buffer = io.BytesIO()
#     torch.save(state, buffer)
#     data = buffer.getvalue()
#
#     # 1. Everything into a file of another name, and that onto the disk.
#     temporary = path.with_name(path.name + ".tmp")
#     with open(temporary, "wb") as file:
#         file.write(hashlib.sha256(data).digest())  # 32 bytes
#         file.write(data)
#         file.flush()
#         os.fsync(file.fileno())
#
#     # 2. The name, all at once; and the folder's list of names onto the disk too.
#     os.replace(temporary, path)
#     fd = os.open(folder, os.O_RDONLY)
#     try:
#         os.fsync(fd)
#     finally:
#         os.close(fd)
#
#     # 3. Only now may old ones go. Names have eight digits, so their order is that of the steps.
#     for old in sorted(folder.glob("step-*.ckpt"))[:-keep]:
#         old.unlink()
#     return path
#     ### END SOLUTION
#
#
# def load_newest(folder):
#     """(step, state) of the newest checkpoint that is whole, tensors on the CPU; None without one.
#
#     A damaged one is passed over, and the one before it is tried.
#     """
#     ### BEGIN SOLUTION
#     for path in sorted(Path(folder).glob("step-*.ckpt"), reverse=True):
#         content = path.read_bytes()
#         digest, data = content[:32], content[32:]
#         if hashlib.sha256(data).digest() != digest:
#             print(f"{path.name} is damaged, trying the one before")
#             continue
#         step = int(path.stem.removeprefix("step-"))
#         return step, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
#     return None
#     ### END SOLUTION

# %% demo="see_checkpoints"
with demo("task 3"):
    if IS_RANK_ZERO:
        sys.path.insert(0, os.getcwd())
        sys.modules.pop("checkpointing", None)
        from checkpointing import load_newest, save_checkpoint

        folder = Path(tempfile.mkdtemp())
        for step in (10, 20, 30, 40):
            save_checkpoint(folder, step, {"weight": torch.full((1000,), float(step))}, keep=3)
        print("files:", sorted(path.name for path in folder.iterdir()))

        newest = folder / "step-00000040.ckpt"
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1  # one bit
        newest.write_bytes(content)
        found = load_newest(folder)
        print(f"after one bit of step 40 has changed: step {found[0]}  (expected 30)")
        print(f"weight[0] = {found[1]['weight'][0]:.0f}  (expected 30)")
        shutil.rmtree(folder)

# %% check="ckpt_roundtrip"
check("ckpt_roundtrip", "checkpointing.py")

# %% check="ckpt_atomic"
check("ckpt_atomic", "checkpointing.py")

# %% check="ckpt_durable"
check("ckpt_durable", "checkpointing.py")

# %% check="ckpt_damage"
check("ckpt_damage", "checkpointing.py")

# %% check="ckpt_keep"
check("ckpt_keep", "checkpointing.py")

# %% [markdown]
# ## Task 4 · Everything that decides the next step
#
# **Why.** A checkpoint with the weights alone resumes *a* run, not *this* run. Without Adam's
# moments the loss jumps. Without the schedule the learning rate starts over. Without the sampler's
# position some samples come twice and others not at all. Without the random numbers, dropout and
# augmentation differ, and you can no longer tell a bug from bad luck. With everything in it, the
# resumed run is equal **bit for bit**, and that can be tested.
#
# One of these differs from rank to rank: the random numbers. Weights, moments and schedule are the
# same everywhere, so rank 0's are enough; but if all ranks resumed with rank 0's random numbers,
# all of them would drop the same units from then on.
#
# The next cell has a sampler that can say where it stands, and a record of a training.


# %% given="training"
class EpochSampler:
    """Deals out the indices 0 … n-1, in another order in every epoch."""

    def __init__(self, num_samples: int, seed: int = 0):
        self.num_samples, self.seed = num_samples, seed
        self.epoch = 0
        self.position = 0  # how many samples of this epoch have been dealt out

    def take(self, count: int) -> list[int]:
        """The next `count` indices; a new epoch begins where one ends."""
        taken = []
        for _ in range(count):
            if self.position == self.num_samples:
                self.epoch, self.position = self.epoch + 1, 0
            generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
            taken.append(int(order[self.position]))
            self.position += 1
        return taken


@dataclass
class Training:
    """All that a training loop carries from one step to the next."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: EpochSampler
    step: int = 0


# %% [markdown]
# **Write `collect_state(training)`**, which every rank calls before a save.
#
# - Return one dict with all of it: model (buffers too), optimizer, scheduler, `sampler.epoch` and
#   `sampler.position`, `training.step`, and the random number states of **all** ranks.
# - Three generators count: torch's (on the CPU, and this rank's GPU if there is one), NumPy's
#   (`np.random`) and Python's (`random`).
# - Rank 0's dict is the one that gets saved, and read by every rank later.
# - Only tensors, numbers, text, `None`, lists, tuples and dicts, so that
#   `torch.load(…, weights_only=True)` reads it. A NumPy array must become a list or a tensor.
# - It changes nothing: collecting draws no random numbers and takes no samples.
#
# **Write `restore_state(training, state)`**: puts all of it into a fresh `training`, on every rank
# that rank's own. The world size is the same as before.
#
# <details><summary>Hint 1: what has a state_dict</summary>
#
# Model, optimizer and scheduler: `x.state_dict()` and `x.load_state_dict(…)`.
# </details>
#
# <details><summary>Hint 2: random numbers</summary>
#
# `torch.get_rng_state()`, `np.random.get_state()` and `random.getstate()`; each has a counterpart
# that sets. NumPy's is a tuple `(name, array, position, has_gauss, gauss)`: turn the array into a
# list.
# </details>
#
# <details><summary>Hint 3: of all ranks</summary>
#
# `everyone = [None] * dist.get_world_size()`, then `dist.all_gather_object(everyone, mine)`.
# </details>


# %% solution="task4_resume"
def collect_state(training: Training) -> dict:
    """Everything that decides the next step, on all ranks; every rank has to call it."""
    ### BEGIN SOLUTION
    name, keys, position, has_gauss, gauss = np.random.get_state()
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "epoch": training.sampler.epoch,
        "position": training.sampler.position,
        "step": training.step,
        "random": everyone,
    }
    ### END SOLUTION


def restore_state(training: Training, state: dict) -> None:
    """Puts into `training` what `collect_state` returned on rank 0."""
    ### BEGIN SOLUTION
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.sampler.epoch = state["epoch"]
    training.sampler.position = state["position"]
    training.step = state["step"]

    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    np.random.set_state(mine["numpy"])
    random.setstate(mine["python"])
    if mine["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
    ### END SOLUTION


# %% [markdown]
# The next cell trains with dropout and noisy inputs for 60 steps. Then it does the same with a
# break after 30: the state goes through a file into a fresh training, and the rest of the 60
# steps come from there.


# %% demo="see_resume"
def fresh_training() -> Training:
    """A small network with dropout, AdamW, and a falling learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    return Training(model, optimizer, scheduler, EpochSampler(50, seed=dist.get_rank()))


def run_steps(training: Training, count: int) -> list[float]:
    """`count` steps; the batch, the noise and the dropout are other ones on every rank."""
    samples = torch.linspace(-1, 1, 50 * 8).reshape(50, 8)
    losses = []
    for _ in range(count):
        x = samples[training.sampler.take(8)]
        y = torch.sin(3 * x.sum(dim=1, keepdim=True))
        noise = torch.from_numpy(np.random.normal(0, 0.05, x.shape)).float()
        loss = nn.functional.mse_loss(training.model(x + noise * random.random()), y)
        training.optimizer.zero_grad()
        loss.backward()
        for param in training.model.parameters():  # the simplest data parallelism
            grad = param.grad.to(device)
            dist.all_reduce(grad)
            param.grad.copy_(grad.cpu() / world_size)
        training.optimizer.step()
        training.scheduler.step()
        training.step += 1
        losses.append(loss.item())
    return losses


def draw_resumed(ax, whole, resumed):
    ax.plot(whole, linewidth=5, alpha=0.35, label="without a break")
    ax.plot(resumed, "--", linewidth=1.5, label="resumed at step 30")
    ax.axvline(30, color="gray", linewidth=1)
    ax.set(xlabel="step", ylabel="loss on rank 0", yscale="log")
    ax.legend()


with demo("task 4"):
    curves = []
    for broken in (False, True):
        training = fresh_training()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(100 + rank)
        losses = run_steps(training, 30)
        if broken:
            file = io.BytesIO()
            torch.save(collect_state(training), file)
            file.seek(0)
            training = fresh_training()
            restore_state(training, torch.load(file, weights_only=True))
        curves.append(losses + run_steps(training, 30))
    same = torch.tensor([float(curves[0] == curves[1])], device=device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if IS_RANK_ZERO:
        print(f"equal bit for bit on every rank: {bool(same.item())}  (expected True)")
    show(partial(draw_resumed, whole=curves[0], resumed=curves[1]))

# %% check="resume_training"
check("resume_training", (collect_state, restore_state))

# %% check="resume_rng"
check("resume_rng", (collect_state, restore_state))

# %% check="resume_sampler"
check("resume_sampler", (collect_state, restore_state))

# %% [markdown]
# ## Task 5 · A script for two nodes
#
# Now the whole thing: a script that trains on all nodes, saves on the way, and after a failure goes
# on as if nothing had happened. It is a file of its own again; it imports your `checkpointing.py`.
#
# First some data.

# %% given="make_data"
if IS_RANK_ZERO:
    numbers = np.random.default_rng(0)
    inputs = numbers.normal(size=(8000, 4)).astype(np.float32)
    np.savez(
        "regression.npz",
        x=inputs,
        y=np.sin(inputs.sum(axis=1, keepdims=True)).astype(np.float32),
        # The model's initial parameters, so that every run starts from the same point.
        p0=numbers.normal(size=(16, 4)).astype(np.float32) / 2,
        p1=np.zeros(16, dtype=np.float32),
        p2=numbers.normal(size=(1, 16)).astype(np.float32) / 4,
        p3=np.zeros(1, dtype=np.float32),
    )

# %% [markdown]
# **Write the rest of `main()` in `train_node.py`.** Its arguments and `make_training` are there.
#
# - Join the process group that torchrun's variables describe; nccl and `LOCAL_RANK`'s GPU if this
#   node has one for each of its processes, else gloo. Wrap the model in PyTorch's DDP.
# - Begin with `load_newest(args.checkpoints)`. If there is a checkpoint, go on from it: model,
#   optimizer, scheduler and losses, on every rank. The earlier run may have had fewer `--steps` or
#   another `--every`, and may have left an `--out`.
# - Step number $i$ (counted from 0 over all runs) takes the rows $iB$ to $(i+1)B-1$ of `x` and `y`,
#   with the global batch size $B$. Rank $r$ takes the $r$-th of $W$ equal parts of them, and
#   touches no other rows: on a real cluster it may not have them. $B$ divides evenly.
# - Mean squared error; one step of the optimizer and one of the scheduler per batch. The loss that
#   counts is the mean over the global batch, before the step.
# - After every `--every` steps, and at no other time, rank 0 (and no other rank) calls
#   `save_checkpoint(args.checkpoints, steps_done, state)`; `steps_done` counts from the very first
#   step. The losses so far are part of the state.
# - At the end rank 0, and no other rank, writes `p0 … p3` and `losses` to `--out`. `losses` has one
#   number for each of the `--steps` steps, those of earlier runs included. This also holds if
#   there was nothing left to do.
# - Do not catch what a collective raises when a node has gone: let it end the process, with an exit
#   code other than 0. Whoever started it will start it again; code 0 says that all is done.
#
# <details><summary>Hint 1: which loss</summary>
#
# Each rank has the mean over its own part. The parts are equally large, so the mean of these means
# is right: all-reduce and divide. Every rank must call it.
# </details>
#
# <details><summary>Hint 2: where to begin</summary>
#
# If the losses so far are in the state, their number is the number of steps done.
# </details>
#
# <details><summary>Hint 3: load before or after wrapping?</summary>
#
# Either. The state of the plain model has names without the `module.` that DDP puts before them, so
# save and load the plain one, and keep a variable for it.
# </details>

# %% solution="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_node.py
# """Trains a small regression network on all nodes; goes on from the newest checkpoint."""
#
# import argparse
# import os
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.nn.parallel import DistributedDataParallel
#
# from checkpointing import load_newest, save_checkpoint
#
#
# def make_training(data, lr):
#     """Model, optimizer and scheduler as they are before the first step."""
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
#     scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 / (10 + step))
#     return model, optimizer, scheduler
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and all losses
#     parser.add_argument("--checkpoints", required=True)  # a folder that all nodes see
#     parser.add_argument("--steps", type=int, required=True)  # in all, earlier runs included
#     parser.add_argument("--every", type=int, required=True)  # steps between checkpoints
#     parser.add_argument("--batch-size", type=int, required=True)  # of all ranks together
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#     data = np.load(args.data)
#     x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
#     ### BEGIN SOLUTION
#     use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else "cpu"
#     if use_cuda:
#         torch.cuda.set_device(device)
#     dist.init_process_group("nccl" if use_cuda else "gloo")
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#
#     model, optimizer, scheduler = make_training(data, args.lr)
#     model = model.to(device)
#     losses = []
#     found = load_newest(args.checkpoints)  # every rank reads it: they share the folder
#     if found is not None:
#         _, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         scheduler.load_state_dict(state["scheduler"])
#         losses = state["losses"]
#     ddp = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
#
#     share = args.batch_size // world_size
#     for step in range(len(losses), args.steps):
#         begin = step * args.batch_size + rank * share  # this rank's part of the global batch
#         rows = slice(begin, begin + share)
#         optimizer.zero_grad()
#         loss = nn.functional.mse_loss(ddp(x[rows].to(device)), y[rows].to(device))
#         loss.backward()
#         optimizer.step()
#         scheduler.step()
#
#         mean = loss.detach() / world_size
#         dist.all_reduce(mean)
#         losses.append(mean.item())
#         if rank == 0 and (step + 1) % args.every == 0:
#             state = {
#                 "model": model.state_dict(),
#                 "optimizer": optimizer.state_dict(),
#                 "scheduler": scheduler.state_dict(),
#                 "losses": losses,
#             }
#             save_checkpoint(args.checkpoints, step + 1, state)
#
#     if rank == 0:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#     ### END SOLUTION
#
#
# if __name__ == "__main__":
#     main()

# %% [markdown]
# The next cell has what it takes to play two nodes on this machine: two torchrun agents, each a
# process of its own, which meet on the loopback interface `lo`. They have nothing to do with the
# ranks of this notebook, so one of them may be killed.


# %% given="nodes"
class Nodes:
    """Nodes played by processes: one agent each, with all that it starts. A `with` ends them."""

    def __init__(self, commands: list[list[str]], log: str = "nodes.log"):
        self.commands, self.log = commands, Path(log)

    def __enter__(self):
        # A new job must not see what torchrun has told this notebook's ranks.
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", "")
        env |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "CUDA_VISIBLE_DEVICES": "",  # two "nodes" would both take the first GPU
            # Restarts on gloo need it: the store that is shared with the rendezvous would still
            # hold the addresses of workers that are gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.log.open("wb") as log:
            self.agents = [
                subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
                for command in self.commands
            ]
        return self

    def kill(self, node: int) -> None:
        """What a power cut does to a node: agent and workers are gone, and nobody says goodbye."""
        agent = self.agents[node].pid
        for pid in [agent, *descendants(agent)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, deadline_s: float = 120.0) -> None:
        """Returns when all nodes have ended well."""
        end_s = time.monotonic() + deadline_s
        for agent in self.agents:
            code = agent.wait(max(0.1, end_s - time.monotonic()))
            if code != 0:
                raise RuntimeError(f"a node ended with code {code}:\n{self.first_error()}")

    def first_error(self) -> str:
        """The log from its first traceback on; the later ones are torchrun's own."""
        log = self.log.read_text()
        start = log.find("Traceback")
        return log[start : start + 2000] if start >= 0 else log[-2000:]

    def __exit__(self, *_):
        for node in range(len(self.agents)):
            self.kill(node)
        for agent in self.agents:
            agent.wait()


# %% [markdown]
# **The rehearsal.** It takes about half a minute. First the job runs without trouble. Then it runs
# again, in another folder, and as soon as it has three checkpoints node 1 is killed, and node 0
# after it, as Slurm does with the rest of a job. One bit of the newest checkpoint flips. Then the
# job is started once more, and should end as if nothing had happened.


# %% demo="see_rehearsal"
def two_nodes(name: str, steps: int = 300) -> Nodes:
    """The job on two nodes of one process each; its files are called after `name`."""
    script = ["train_node.py", "--data=regression.npz", f"--out={name}.npz"]
    script += [f"--checkpoints={name}", f"--steps={steps}", "--every=20", "--batch-size=16"]
    port = free_port()
    commands = [
        node_command(
            [*script, "--lr=0.3"],
            num_nodes=2,
            local_size=1,
            node_rank=node,
            head="127.0.0.1",
            port=port,
            run_id=f"lab5-{name}",
        )
        for node in range(2)
    ]
    return Nodes(commands)


def draw_killed(ax, whole, resumed, first_step):
    ax.plot(whole, linewidth=5, alpha=0.35, label="without trouble")
    ax.plot(resumed, linewidth=1, label="killed, damaged, resumed")
    ax.axvline(first_step, color="gray", linewidth=1)
    ax.set(xlabel="step", ylabel="loss", yscale="log")
    ax.legend()


with demo("tasks 1, 3 and 5"):
    if IS_RANK_ZERO:
        for name in ("whole", "killed"):
            shutil.rmtree(name, ignore_errors=True)
            Path(f"{name}.npz").unlink(missing_ok=True)
        with two_nodes("whole") as nodes:
            nodes.wait()

        checkpoints = Path("killed")
        with two_nodes("killed") as nodes:
            end_s = time.monotonic() + 60
            while len(list(checkpoints.glob("step-*.ckpt"))) < 3 and time.monotonic() < end_s:
                if any(agent.poll() is not None for agent in nodes.agents):
                    break  # the log says why
                time.sleep(0.002)
            nodes.kill(1)
            nodes.kill(0)
        Path("killed.npz").unlink(missing_ok=True)
        there = sorted(checkpoints.glob("step-*.ckpt"))
        if len(there) < 2:
            raise RuntimeError(f"no checkpoints came:\n{nodes.first_error()}")
        print("after the kill there are:", [path.name for path in there])
        content = bytearray(there[-1].read_bytes())
        content[len(content) // 2] ^= 1
        there[-1].write_bytes(content)

        with two_nodes("killed") as nodes:
            nodes.wait()
        whole, resumed = (np.load(f"{name}.npz")["losses"] for name in ("whole", "killed"))
        print(f"{there[-1].name} was damaged, so the job resumed before it")
        equal = np.array_equal(whole, resumed)
        print(f"all {len(whole)} losses equal bit for bit: {equal}  (expected True)")
        first_step = int(there[-2].stem.removeprefix("step-"))
        show(partial(draw_killed, whole=whole, resumed=resumed, first_step=first_step))

# %% check="node_script"
check("node_script", "train_node.py")

# %% check="node_resumes"
check("node_resumes", "train_node.py")

# %% check="node_lost"
check("node_lost", "train_node.py")

# %% [markdown]
# Here a person (or Slurm's `--requeue`) started the job again. torchrun can do it too: with
# `--nnodes=1:2 --max-restarts=3` the agents that are left meet again, start their workers anew
# with the ranks that there are, and the script loads its checkpoint as it does now. (Not if node 0
# is lost: its agent hosts the store at which they meet.) Then the number of ranks changes, the sums
# are taken in another order, and the curve is the same only up to rounding.
#
# **Optional: nodes with a network card each.** If you are root on a Linux machine with `ip` and
# `tc`, two network namespaces are closer to two real nodes: each has its own `eth0`, and the wire
# between them is as slow as you like.

# %% given="write_namespaces" tags=["active-ipynb"]
# %%rank 0
# %%writefile two_namespaces.sh
# #!/bin/bash
# # Two nodes with a network card each, on one machine, as root: network namespaces on a bridge.
# # What the script is given as arguments runs on both; $NODE is 0 or 1, the head is 10.77.0.1.
# set -e
# cleanup() {
#     for node in 0 1; do ip netns delete "lab5-$node" 2>/dev/null || true; done
#     ip link delete lab5-bridge 2>/dev/null || true
# }
# trap cleanup EXIT
# cleanup
# ip link add lab5-bridge type bridge
# ip link set lab5-bridge up
# for node in 0 1; do
#     ip netns add "lab5-$node"
#     ip link add "lab5-v$node" type veth peer name eth0 netns "lab5-$node"
#     ip link set "lab5-v$node" master lab5-bridge up
#     ip -n "lab5-$node" address add "10.77.0.$((node + 1))/24" dev eth0
#     ip -n "lab5-$node" link set lo up
#     ip -n "lab5-$node" link set eth0 up
#     # A slow network: 100 Mbit/s. Leave it out for a fast one.
#     ip netns exec "lab5-$node" tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 50ms
# done
# for node in 0 1; do
#     NODE=$node GLOO_SOCKET_IFNAME=eth0 ip netns exec "lab5-$node" timeout 300 bash -c "$*" &
# done
# wait

# %% [markdown]
# In a terminal, in this folder (quotes as they stand, so that `$NODE` arrives):
#
# ```bash
# sudo env PATH="$PATH" bash two_namespaces.sh 'torchrun --nnodes=2 --nproc-per-node=1 \
#     --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29500 --rdzv-id=lab5 \
#     --rdzv-conf=is_host=$((1 - NODE)) --local-addr=10.77.0.$((NODE + 1)) train_node.py \
#     --data=regression.npz --out=spaces.npz --checkpoints=spaces --steps=100 --every=20 \
#     --batch-size=16 --lr=0.3'
# ```
#
# `is_host` and `--local-addr` say what torchrun guesses from host names otherwise, and both
# namespaces have the same host name.
#
# ## Task 6 · How fast is the link?
#
# **Why.** Before you tune anything, know what the network can do. A message of $B$ bytes takes
# about
#
# $$t(B) = \alpha + B / \beta$$
#
# with the latency $\alpha$ in seconds and the bandwidth $\beta$ in bytes per second. Small messages
# measure $\alpha$, large ones $\beta$. Three things spoil a measurement: the first calls, which
# open connections; single calls that were disturbed; and a clock that is stopped too early.
#
# **Write `measure_link(exchange, sizes, *, clock, warmup, repeats)`.**
#
# - `exchange(num_bytes)` sends that much and returns when it has arrived. `clock()` gives seconds.
# - For every size: `warmup` calls that do not count, then `repeats` calls, each timed by itself.
#   Take their **median**.
# - Lay a straight line through the points (bytes, seconds). Return
#   `(latency_s, bandwidth_bytes_per_s)`.
#
# <details><summary>Hint</summary>
#
# `statistics.linear_regression(sizes, seconds)` has a `slope`, in seconds per byte, and an
# `intercept`, in seconds.
# </details>
#
# A collective needs one more step before you can compare it with what is printed on a network card:
# a ring all-reduce of $B$ bytes on $n$ ranks sends $2\frac{n-1}{n}B$ over every link. What the link
# carried per second is called *bus bandwidth*
# ([NCCL's tests](https://github.com/NVIDIA/nccl-tests) print it as `busbw`).
#
# **Write `bus_bandwidth(kind, num_bytes, seconds, num_ranks)`.**
#
# - In **Gbit/s**, as network cards are sold: $10^9$ bits, and a byte has 8 of them.
# - `num_bytes` is the whole tensor: what is all-reduced or broadcast, the gathered result of an
#   all-gather, the input of a reduce-scatter.
# - The factor is $2\frac{n-1}{n}$ for `"all_reduce"`, $\frac{n-1}{n}$ for `"all_gather"` and
#   `"reduce_scatter"`, and 1 for `"broadcast"`.


# %% solution="task6_link"
def measure_link(
    exchange: Callable[[int], object],
    sizes: list[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    warmup: int = 2,
    repeats: int = 5,
) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of what `exchange` sends over."""
    ### BEGIN SOLUTION
    medians = []
    for num_bytes in sizes:
        for _ in range(warmup):
            exchange(num_bytes)
        seconds = []
        for _ in range(repeats):
            began = clock()
            exchange(num_bytes)
            seconds.append(clock() - began)
        medians.append(statistics.median(seconds))
    line = statistics.linear_regression(sizes, medians)
    return line.intercept, 1 / line.slope
    ### END SOLUTION


def bus_bandwidth(kind: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What every link carried during a collective, in Gbit/s."""
    ### BEGIN SOLUTION
    factor = {
        "all_reduce": 2 * (num_ranks - 1) / num_ranks,
        "all_gather": (num_ranks - 1) / num_ranks,
        "reduce_scatter": (num_ranks - 1) / num_ranks,
        "broadcast": 1.0,
    }[kind]
    return factor * num_bytes * 8 / seconds / 1e9
    ### END SOLUTION


# %% [markdown]
# Now for real: all-reduces between the ranks of this notebook. On a laptop the link is the
# computer's memory, and the numbers change from run to run. On a cluster the same cell measures
# the network. A gloo all-reduce of 4 MB usually shows between 1 and 20 Gbit/s here.

# %% demo="see_link"
with demo("task 6"):

    def all_reduce_of(num_bytes: int) -> None:
        dist.all_reduce(torch.zeros(num_bytes // 4, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()

    latency_s, bandwidth = measure_link(all_reduce_of, [4_000, 400_000, 4_000_000])
    if IS_RANK_ZERO:
        taken_s = latency_s + 4e6 / bandwidth
        bus = bus_bandwidth("all_reduce", 4_000_000, taken_s, world_size)
        print(f"latency {latency_s * 1e6:.0f} µs, {bandwidth / 1e6:.0f} MB/s; on the bus", end=" ")
        print(f"{bus:.2f} Gbit/s with {world_size} ranks")

# %% check="link_measure"
check("link_measure", measure_link)

# %% check="link_bus"
check("link_bus", bus_bandwidth)

# %% [markdown]
# ## Task 7 · Spare the slow link
#
# **Why.** A flat ring through all ranks does not know which of its links are slow. Each link
# between nodes carries $2\frac{W-1}{W}B$ bytes, nearly twice the tensor, and all other links
# wait for it. A **hierarchical** all-reduce goes in three steps:
#
# ```
#                 node 0                          node 1
#           rank 0      rank 1              rank 2      rank 3
#          [a0 b0]     [a1 b1]             [a2 b2]     [a3 b3]
#   1. reduce-scatter inside each node: every rank has the node's sum of one part
#           a0+a1       b0+b1               a2+a3       b2+b3
#   2. all-reduce between nodes, each rank with those of its local rank: 1/L of the data
#          └───────────────│── a ─────────────┘           │
#                          └──────────── b ───────────────┘
#   3. all-gather inside each node
#          [ a  b ]    [ a  b ]            [ a  b ]    [ a  b ]
# ```
#
# With $L$ ranks per node and $n$ nodes, a rank sends $2\frac{n-1}{n}\cdot\frac{B}{L}$ to other
# nodes, and all $L$ network cards of a node work at once. Steps 1 and 3 run on the fast links.
#
# **Write `HierarchicalAllReduce`.**
#
# - `HierarchicalAllReduce(local_size)` is made by all ranks, with nodes of `local_size`
#   neighbouring ranks (it divides the world size). It makes the groups it needs, once.
# - Calling it with a tensor puts the **sum** over all ranks into that tensor, in place, and
#   returns that tensor. The tensor is contiguous, of any shape, size and floating dtype; its size
#   need not be a multiple of anything.
# - Between nodes no rank sends more than a ring all-reduce of its $1/L$ of the tensor. Inside a
#   node no rank sends more than a reduce-scatter and an all-gather of the tensor.
# - It works for `local_size` 1 and for a single node, too.
#
# <details><summary>Hint 1: groups</summary>
#
# `dist.new_group(ranks)` must be called by **all** ranks for **every** group, in the same order,
# also for groups that they are not in. With two nodes of two: `[0, 1]`, `[2, 3]` inside, then
# `[0, 2]`, `[1, 3]` across.
# </details>
#
# <details><summary>Hint 2: sizes that do not divide</summary>
#
# Copy the tensor into a flat one that is padded with zeros to the next multiple of $L$. At the end
# copy its beginning back.
# </details>
#
# <details><summary>Hint 3: names</summary>
#
# `reduce_scatter_single(output, input, group=…)` and `all_gather_single(output, input, group=…)`
# from `minidist.device` are torch's functions, under a name that no version of torch warns about.
# </details>


# %% solution="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        """Makes the groups, for nodes of `local_size` neighbouring ranks."""
        ### BEGIN SOLUTION
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % local_size:
            raise ValueError(f"{world_size} ranks do not make nodes of {local_size}")
        self.local_size = local_size

        # All ranks make all groups, in the same order, and keep the two that they are in.
        for first in range(0, world_size, local_size):
            ranks = list(range(first, first + local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local_rank in range(local_size):
            ranks = list(range(local_rank, world_size, local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.across = group
        ### END SOLUTION

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts the sum over all ranks into `tensor`."""
        ### BEGIN SOLUTION
        flat = tensor.detach().view(-1)
        part_size = -(-flat.numel() // self.local_size)  # rounded up
        padded = flat.new_zeros(part_size * self.local_size)
        padded[: flat.numel()] = flat

        part = flat.new_empty(part_size)
        reduce_scatter_single(part, padded, group=self.inside)
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)

        flat.copy_(padded[: flat.numel()])
        return tensor
        ### END SOLUTION


# %% [markdown]
# The next cell puts a flat and your all-reduce on an *emulated* cluster: two nodes of two GPUs,
# with 32 GB/s inside a node and 1 GB/s between nodes. The code runs for real, in new processes;
# the time is computed. Expect for a tensor of 4 MB 6.1 ms from the flat ring, all of it on the slow
# link, and 4.2 ms from yours, which sends a third less. These nodes have a single network card
# each, so their two parts cross one after the other; with a card per GPU they would cross at once.

# %% demo="see_hierarchy" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# two_by_two = emulate.Cluster(
#     name="two nodes of two",
#     nodes=2,
#     devices_per_node=2,
#     intra_node=emulate.Link(bandwidth_bytes_per_s=32e9, latency_s=5e-6),
#     inter_node=emulate.Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5),
#     peak_flops_per_s=1e14,
#     memory_bandwidth_bytes_per_s=1e13,
# )
#
#
# def flat_all_reduce(reducer_class):
#     dist.all_reduce(torch.ones(1_000_000))
#
#
# def hierarchical_all_reduce(reducer_class):
#     reducer_class(2)(torch.ones(1_000_000))
#
#
# def draw_links(ax, timelines):
#     for row, (label, timeline) in enumerate(timelines.items()):
#         for rank in (0, 1):
#             for interval in timeline.intervals[rank]:
#                 if interval.kind == "communication":
#                     start, end = interval.start_s * 1e3, interval.end_s * 1e3
#                     kind = interval.name.split()[0]
#                     color = {"all_reduce": "C3", "reduce_scatter": "C0", "all_gather": "C2"}
#                     shade = color.get(kind, "C7")
#                     ax.barh(2.4 * row + rank, end - start, left=start, color=shade)
#         ax.text(0, 2.4 * row - 0.6, label)
#     ax.set_yticks([0, 1, 2.4, 3.4], ["rank 0", "rank 1"] * 2)
#     ax.set(xlabel="virtual milliseconds", ylim=(4.1, -1))
#     ax.set_title("red: all-reduce, blue: reduce-scatter, green: all-gather")
#
#
# with demo("task 7"):
#     timelines = {}
#     for label, function in (("flat", flat_all_reduce), ("yours", hierarchical_all_reduce)):
#         _, timeline = emulate.run(function, 4, two_by_two, HierarchicalAllReduce)
#         timelines[label] = timeline
#         sent = timeline.bytes_per_link.get("node 0", 0.0) / 1e6
#         print(f"{label:>5}: {timeline.makespan_s * 1e3:.1f} ms, node 0 sent {sent:.1f} MB")
#     show(partial(draw_links, timelines=timelines), height=3.2)

# %% check="hier_values"
check("hier_values", HierarchicalAllReduce)

# %% check="hier_slow_bytes"
check("hier_slow_bytes", HierarchicalAllReduce)

# %% check="hier_local_bytes"
check("hier_local_bytes", HierarchicalAllReduce)

# %% [markdown]
# PyTorch's DDP lets you replace its all-reduce. `model.register_comm_hook(state, hook)` makes it
# call `hook(state, bucket)` for every bucket of gradients, with the state of your choice: here, an
# all-reduce such as yours.
#
# **Write `all_reduce_hook(all_reduce, bucket)`.** DDP wants the second argument to have this name.
#
# - `bucket.buffer()` is a flat tensor with this rank's gradients. Sum it with `all_reduce`, which
#   works in place as yours does, and divide by the number of ranks of the whole job.
# - Return a `torch.futures.Future` that already has the result.
#
# <details><summary>Hint</summary>
#
# `future = torch.futures.Future()` and `future.set_result(tensor)`.
# </details>


# %% solution="task7_hook"
def all_reduce_hook(
    all_reduce: Callable[[torch.Tensor], torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP: the mean over ranks, by means of `all_reduce`."""
    ### BEGIN SOLUTION
    flat = bucket.buffer()
    all_reduce(flat)
    flat /= dist.get_world_size()
    future = torch.futures.Future()
    future.set_result(flat)
    return future
    ### END SOLUTION


# %% demo="see_hook"
with demo("task 7"):
    torch.manual_seed(0)
    plain = nn.Linear(6, 2).to(device)
    x = torch.full((4, 6), float(rank + 1), device=device)  # other data on every rank
    ids = [device.index] if device.type == "cuda" else None
    gradients = []
    for hooked in (False, True):
        model = DistributedDataParallel(copy.deepcopy(plain), device_ids=ids)
        if hooked:
            size = 2 if world_size % 2 == 0 else world_size
            model.register_comm_hook(HierarchicalAllReduce(size), all_reduce_hook)
        model(x).pow(2).mean().backward()
        gradients.append(model.module.weight.grad)
    error = (gradients[0] - gradients[1]).abs().max().item()
    if IS_RANK_ZERO:
        print(f"largest difference from DDP's own all-reduce: {error:.1e}  (fine: below 1e-4)")
    del model

# %% check="hier_hook"
check("hier_hook", all_reduce_hook)

# %% [markdown]
# ## Yours beside PyTorch's
#
# The next cell trains one network with your all-reduce in a hook, with the course's own, and with
# DDP's. All get the same weights and batches, so the losses must agree up to rounding. The emulated
# cluster has nodes of two, with links ten times as fast inside as between them. Expect DDP's own to
# win there, though the hierarchy sends less between nodes: it runs behind the backward pass, and a
# hook that waits does not.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# def hooked(hook, make_state):
#     def wrap(net):
#         ddp = DistributedDataParallel(net, bucket_cap_mb=0.6)
#         ddp.register_comm_hook(make_state(), hook)
#         return ddp
#
#     return training(wrap)
#
#
# with demo("task 7"):
#     size = 2 if world_size % 2 == 0 else 1
#     ours = find("minidist.collectives.ddp_hooks:hierarchical_hook")
#     groups = find("minidist.collectives.hierarchical:node_groups")
#     beside(
#         {
#             "yours": hooked(all_reduce_hook, lambda: HierarchicalAllReduce(size)),
#             "the course's": ours and hooked(ours, lambda: groups(size)),
#             "PyTorch's": training(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.6)),
#         },
#         device=device,
#         ranks_per_node=size,
#     )

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. A node fails on average once in 50 days. How often does something fail in a job on 500
# nodes? A checkpoint takes 30 s: how often should you save?**
#
# <!-- BEGIN SOLUTION -->
# Failures add up: 500 nodes fail 10 times a day, once in 2.4 hours. Saving every T costs 30 s
# per T, and a failure throws away T/2 on average. The sum 30 s / T + T / (2 · 8640 s) is least at
# T = sqrt(2 · 30 s · 8640 s) = 720 s, about every 12 minutes (Young's rule): then each of the two
# costs 4 %. Writing in the background lowers the 30 s.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. The run resumes with 3 nodes where it had 4. Which of your checkpoint's parts still fit, and
# what has to change so that the loss curve still means the same?**
#
# <!-- BEGIN SOLUTION -->
# Model, optimizer, scheduler and step fit: they are the same on every rank (sharded ones must be
# cut anew). The random numbers of 4 ranks do not fit 3 nodes' ranks: seed them from step and rank.
# The sampler's position counts samples of all ranks, so it has to be dealt out anew. Keep the
# *global* batch, by larger shares or more accumulation, or else the learning rate and the
# schedule, which count steps, no longer fit. Equal bit for bit it is not: sums have another order.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Rank 0 writes 2 TB and all others wait. Name two ways out, and what each of them costs.**
#
# <!-- BEGIN SOLUTION -->
# Sharded: every rank writes its own part, in parallel; costs a format that can be read by another
# number of ranks, and a commit once all parts are there (one rank without its part makes the
# whole checkpoint worthless). In the background: copy to the CPU's memory, then train on while a
# thread writes; costs that memory, and a window in which the newest checkpoint is not on disk
# yet. Both together are usual.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. When is a flat ring no worse than your hierarchical all-reduce?**
#
# <!-- BEGIN SOLUTION -->
# On one node, or with one rank per node, they are the same. With many nodes the factor
# 2(W-1)/W of the flat ring and 2(n-1)/n of the hierarchical one both come near 2, so over a node's
# *single* network card the bytes hardly differ; what is left is latency: 2(n-1) slow hops
# instead of 2(W-1), and several cards per node at work at once. For small tensors three collectives
# instead of one may cost more than they save.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - [ ] you can write down the ranks of a job on nodes of unequal size;
# - [ ] you can start a job on two machines from memory, and name three reasons for which it hangs;
# - [ ] you know why `torch.save` under the final name is not a checkpoint;
# - [ ] you can list what a checkpoint must hold, and which part of it differs from rank to rank;
# - [ ] you have killed a node and got the same loss curve;
# - [ ] you can say how fast your network is, in the unit that is printed on the card;
# - [ ] you can explain what crosses between nodes in a hierarchical all-reduce, and what does not.
#
# ## Read next
#
# - Llama Team, *The Llama 3 Herd of Models*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783).
#   Section 3.3.4: what broke in 54 days on 16,384 GPUs.
# - Kokolis et al., *Revisiting Reliability in Large-Scale Machine Learning Research Clusters*,
#   [arXiv 2410.21680](https://arxiv.org/abs/2410.21680). How often nodes fail, and what it costs.
# - Eisenman et al., *Check-N-Run: a Checkpointing System for Training Deep Learning Recommendation
#   Models*, [arXiv 2010.08679](https://arxiv.org/abs/2010.08679). Checkpoints in the background, in
#   parts, and small.
# - Jia et al., *Highly Scalable Deep Learning Training System with Mixed-Precision: Training
#   ImageNet in Four Minutes*, [arXiv 1807.11205](https://arxiv.org/abs/1807.11205). Hierarchical
#   all-reduce in practice.
# - Mikami et al., *Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash*,
#   [arXiv 1811.05233](https://arxiv.org/abs/1811.05233). The same idea on a two-dimensional torus.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    os.chdir("/")
    shutil.rmtree(where[0])
    print("lab 5 is done")
