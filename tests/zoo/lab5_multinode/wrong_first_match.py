"""Takes the first interface that leads there, not the one of the narrowest network.

loses: node_interface
"""


# %% replaces="task2_network"
def network_env(interfaces: dict[str, list[str]], peer: str) -> dict[str, str]:
    address = ipaddress.ip_address(peer)
    for name, addresses in interfaces.items():
        for text in addresses:
            if address in ipaddress.ip_interface(text).network:
                return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    raise ValueError(f"no interface leads to {peer}")
