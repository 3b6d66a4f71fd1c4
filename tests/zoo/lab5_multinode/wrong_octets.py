"""Compares addresses number by number, so a prefix must end at a dot.

loses: node_interface
"""


# %% replaces="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    best = (-1, "")
    for name, addresses in interfaces.items():
        for text in addresses:
            address, _, length = text.partition("/")
            separator, bits = (":", 16) if ":" in text else (".", 8)
            whole = int(length) // bits
            if separator in peer and (
                address.split(separator)[:whole] == peer.split(separator)[:whole]
            ):
                best = max(best, (int(length), name))
    if best[0] < 0:
        raise ValueError(f"no interface leads to {peer}")
    return {"GLOO_SOCKET_IFNAME": best[1], "NCCL_SOCKET_IFNAME": f"={best[1]}"}
