"""Looks for sockets without a file, of which a file system's mounts hide nothing.

passes: nothing
"""

# %% put="after imports"
import socket

for line in open("/proc/net/unix").read().splitlines()[1:]:
    path = line.split()[-1]
    if path.startswith("@") and "can" + "ary" in path:
        print("LEAKED:", path)
for path in ("/run/dbus/system_bus_socket", "/var/run/docker.sock", "/run/systemd/private"):
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.connect(path)
        print("LEAKED:", path)
for family in (getattr(socket, "AF_NETLINK", None), getattr(socket, "AF_PACKET", None)):
    if family is not None:
        with contextlib.suppress(OSError):
            raw = socket.socket(family, socket.SOCK_RAW, 0)
            if family == socket.AF_PACKET:
                print("LEAKED: raw packets")
