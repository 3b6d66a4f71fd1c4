"""Connects to the internet, to name servers and to the machine that grades.

passes: nothing
ci: yes
"""

# %% put="after imports"
import socket

for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in (("1.1.1.1", 53), ("8.8.8.8", 443), ("169.254.169.254", 80), ("10.0.0.1", 22)):
        with socket.socket(socket.AF_INET, kind) as sock, contextlib.suppress(OSError):
            sock.settimeout(1.0)
            sock.connect(address)
            print("LEAKED:", address)
for name in ("pypi.org", "host.docker.internal", "metadata.google.internal"):
    with contextlib.suppress(OSError):
        print("LEAKED:", socket.gethostbyname(name))
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    print("LEAKED: interfaces", socket.if_nameindex())
