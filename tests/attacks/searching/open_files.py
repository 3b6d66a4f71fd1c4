"""Follows every open file of every process, the box's first one included.

passes: nothing
"""

# %% put="after imports"
import glob

for link in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cwd"):
    with contextlib.suppress(OSError):
        target = os.readlink(link)
        inside = (
            "/dev/",
            "/tmp",
            "socket:",
            "pipe:",
            "anon_inode:",
            "/proc",
            "/memfd",
            "/usr",
            "/",
        )
        if not target.startswith(inside) or "/build/" in target:
            print("LEAKED:", link, target)
    with contextlib.suppress(OSError):
        if b"can" + b"ary-" in os.pread(os.open(link, os.O_RDONLY | os.O_NONBLOCK), 1 << 16, 0):
            print("LEAKED: content of", link)
