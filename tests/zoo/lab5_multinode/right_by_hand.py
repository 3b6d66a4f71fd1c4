"""Node ranks by hand, python -m instead of torchrun, bisection, NumPy's median and fit; sizes are
measured in turn.

loses: nothing
"""


# %% replaces="task1_places"
def locate(rank, local_sizes):
    ends = np.cumsum(local_sizes)
    node = np.searchsorted(ends, rank, side="right")
    return node, rank - (ends[node] - local_sizes[node])


def global_rank(node_rank, local_rank, local_sizes):
    return int(np.sum(local_sizes[:node_rank], dtype=int)) + local_rank


# %% replaces="task1_command"
def node_command(script, *, num_nodes, local_size, node_rank, head, port, run_id, max_restarts=0):
    options = {
        "nnodes": num_nodes,
        "nproc_per_node": local_size,
        "node_rank": node_rank,
        "master_addr": head,
        "master_port": port,
        "max_restarts": max_restarts,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    torchrun = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, *words, *script]


# %% replaces="task2_network"
def network_env(interfaces, peer):
    found = {}
    for name, addresses in interfaces.items():
        for address in addresses:
            network = ipaddress.ip_network(address, strict=False)
            if ipaddress.ip_address(peer) in network:
                found[network.prefixlen] = name
    if not found:
        raise ValueError(peer)
    name = found[max(found)]
    others = ",".join(other for other in interfaces if other != name)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": "^=" + others}


# %% replaces="task6_link"
def measure_link(exchange, sizes, *, clock=time.perf_counter, warmup=2, repeats=5):
    times, now = np.zeros((warmup + repeats, len(sizes))), clock()
    for row in times:
        for number, size in enumerate(sizes):
            exchange(size)
            before, now = now, clock()
            row[number] = now - before
    medians = np.median(times[warmup:], axis=0)
    slope, intercept = np.polyfit(np.array(sizes) / 1e6, medians, 1)
    return intercept, 1e6 / slope


def bus_bandwidth(kind, num_bytes, seconds, num_ranks):
    bits = 8e-9 * num_bytes
    if kind != "broadcast":
        bits *= (num_ranks - 1) / num_ranks
    return bits * (1 + (kind == "all_reduce")) / seconds
