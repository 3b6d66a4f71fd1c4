"""Every node looks for the others at its own address.

loses: node_command
class: example
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
    """The torchrun command of node `node_rank` of a job, as a list of words."""
    # node_rank is not needed: with c10d the agents agree on it when they meet.
    return [
        "torchrun",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={local_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        f"--rdzv-id={run_id}",
        f"--max-restarts={max_restarts}",
        *script,
    ]
