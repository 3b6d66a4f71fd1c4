"""Puts torchrun's options into the caller's list; the next node's command holds them twice.

loses: node_command
"""


# %% replaces="task1_command"
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
    words = [
        "torchrun",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={local_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{port}",
        f"--rdzv-id={run_id}",
        f"--max-restarts={max_restarts}",
    ]
    script[:0] = words
    return script
