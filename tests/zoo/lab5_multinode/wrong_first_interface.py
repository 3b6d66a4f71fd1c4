"""Takes the first interface that is not the loopback.

loses: node_interface
"""


# %% replaces="task2_network"
def network_env(interfaces, peer):
    name = next(name for name in interfaces if name != "lo")
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
