# %% [markdown]
# # Start here: one notebook, many ranks
#
# A model that is too slow to train on one GPU is trained on many. Then many copies of one program
# run at the same time. Each copy is called a **rank**, and the number of ranks is the **world
# size**. The ranks share no memory. They have to send each other messages.
#
# In this course you write the parts of such a program yourself, and you see what each of them
# costs. You need Python and a little PyTorch. You do not need a GPU: everything here runs on a
# laptop's CPU, with the same calls as on a cluster.
#
# **This notebook** shows how to run a cell on all ranks, how ranks exchange data, and how long that
# takes. It takes about ten minutes.

# %% [markdown]
# ## Every cell runs on every rank
#
# Look at the kernel's name at the top right: *torchrun × 2*. It starts two processes, as the
# command `torchrun --nproc-per-node 2 script.py` does, and it gives every cell to both. Run the
# next cell with Shift-Enter. There are two answers, one from each rank.

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
print(f"I am rank {rank} of {world_size}, process {os.getpid()}")

# %% [markdown]
# Both ranks ran the same code, but their variables are their own. A cell that begins with
# `%%rank 0` runs on rank 0 only. Use it to write a file or to run a shell command once.

# %%
# %%rank 0
print("Only rank 0 prints this.")

# %% [markdown]
# ## Ranks exchange data
#
# Before ranks can send each other data they have to find each other. `init_process_group` does
# that. It reads the addresses from variables that torchrun has set, and it uses the backend *gloo*,
# which carries data between CPUs. With a GPU for each rank you would use *nccl*.

# %%
if not dist.is_initialized():
    dist.init_process_group("gloo")
dist.get_backend(), dist.get_world_size()

# %% [markdown]
# Now the most important operation in this course. In an **all-reduce** every rank gives a tensor,
# and every rank gets the sum of all of them. Here rank 0 gives ones and rank 1 gives twos.
#
# Before you run the cell: what will each rank print last?

# %%
x = torch.full((3,), float(rank + 1))
print("before", x)
dist.all_reduce(x)
print("after ", x)
assert x.tolist() == [sum(range(1, world_size + 1))] * 3

# %% [markdown]
# Training on many GPUs is this at heart: each rank computes gradients from its own part of the
# batch, and an all-reduce adds them up. So it matters how long an all-reduce takes.
#
# An all-reduce is a **collective**: every rank has to call it. If one rank does not, the others
# wait. This kernel then tells you which rank waits where.

# %% [markdown]
# ## What an all-reduce costs
#
# The next cell measures it for messages of 1 KiB to 4 MiB. It keeps the best of five runs, because
# other programs on your machine can only make a run slower. The cell after it draws the result.
# **Cells that only draw are folded: run them as they are, or click on ••• to read them.**


# %%
def all_reduce_time(num_bytes: int) -> float:
    """Seconds that an all-reduce of num_bytes takes: the best of five, on the slowest rank."""
    tensor = torch.zeros(num_bytes // 4)
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        best = min(best, time.perf_counter() - start)
    slowest = torch.tensor(best)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


sizes = [2**power for power in range(10, 23)]
seconds = [all_reduce_time(size) for size in sizes]

# %%
# %%rank 0
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.loglog(sizes, [1e3 * s for s in seconds], "o-", label="measured")
bandwidth = sizes[-1] / seconds[-1]
axes.loglog(sizes, [1e3 * size / bandwidth for size in sizes], "--", label="if only bytes counted")
axes.set_xlabel("bytes in the message")
axes.set_ylabel("time of one all-reduce (ms)")
axes.set_title(f"All-reduce between {world_size} ranks, gloo, this machine")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# The dashed line is the time there would be if each byte cost the same and nothing else did.
#
# - On the right the points follow it: a large message takes the time that its bytes take. This
#   limit is called **bandwidth**.
# - On the left they lie above it: however small a message is, it takes some time to start. This
#   is called **latency**.
#
# Hence a rule that you will meet again in lab 1: one large message is cheaper than many small ones.

# %%
# %%rank 0
per_byte = [s / size for s, size in zip(seconds, sizes, strict=True)]
print(f"one byte in the smallest message costs {per_byte[0] / per_byte[-1]:.0f} times as much")
print(f"as one byte in the largest; a message takes at least {1e6 * min(seconds):.0f} microseconds")

# %% [markdown]
# ## Try it
#
# 1. Choose *Kernel → Change Kernel… → torchrun × 4*, and run all cells again. Which numbers change,
#    and which do not?
# 2. Put `dist.all_reduce(x)` into a cell that begins with `%%rank 0`, and run it. What does the
#    kernel tell you? Then run `%restart_ranks` in a cell: it gives you fresh ranks, so all cells
#    have to run again.
# 3. In the all-reduce cell, replace the sum by `op=dist.ReduceOp.MAX`. What do you expect? (The
#    check in its last line has to change too.)
#
# Go on with [lecture 1](01_why_distributed.ipynb). After lecture 3 you make a training loop run on
# many ranks yourself, in [lab 1](../labs/lab1_ddp/lab1_ddp.ipynb).
