"""Looks at the folder of the sockets, and tries to change what lies there.

passes: nothing
"""

# %% put="after imports"
folder = os.environ["MINIDIST_RUN_DIR"]
for name in os.listdir(folder):
    path = os.path.join(folder, name)
    for act in (
        lambda: os.unlink(path),
        lambda: os.symlink("/etc/passwd", path + ".link"),
        lambda: os.rename(path, path + ".old"),
        lambda: os.chmod(path, 0),
    ):
        with contextlib.suppress(OSError):
            act()
            print("LEAKED: changed", path)
for act in (
    lambda: os.rename(folder, "/tmp/away"),
    lambda: os.listdir(os.path.dirname(folder) + "/f"),
):
    with contextlib.suppress(OSError):
        act()
        print("LEAKED: the folder itself")
