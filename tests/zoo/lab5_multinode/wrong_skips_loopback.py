"""Never takes lo, not even for 127.0.0.1.

loses: node_interface
"""


# %% replaces="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    best = None
    for name, addresses in interfaces.items():
        for address in addresses if name != "lo" else []:
            network = ipaddress.ip_interface(address).network
            inside = ipaddress.ip_address(peer) in network
            if inside and (best is None or network.prefixlen > best[0]):
                best = network.prefixlen, name
    if best is None:
        raise ValueError(f"no interface leads to {peer}")
    return {"GLOO_SOCKET_IFNAME": best[1], "NCCL_SOCKET_IFNAME": f"={best[1]}"}
