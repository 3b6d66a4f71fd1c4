"""Forgets that NCCL takes a name for the beginning of names.

loses: node_nccl
"""


# %% replaces="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface which leads to `peer`."""
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
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
