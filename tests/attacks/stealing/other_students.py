"""Looks for what others have handed in, to copy it or to spoil it.

passes: nothing
"""

# %% put="after imports"
for folder, folders, files in os.walk("/"):
    if folder == "/":
        folders[:] = [f for f in folders if f not in ("proc", "sys", "dev", "usr")]
    for name in files:
        if name.endswith(".ipynb") and "site-packages" not in folder and "/lib/" not in folder:
            print("LEAKED: a notebook:", folder, name)
            with contextlib.suppress(OSError):
                open(os.path.join(folder, name), "w").close()
for name in ("submitted", "handed_in", "autograded", "feedback", "/srv/nbgrader/exchange"):
    if os.path.exists(name) or os.path.exists(f"../{name}") or os.path.exists(f"../../{name}"):
        print("LEAKED:", name)
if os.path.isdir("/usr/local/share/nbgrader") and os.listdir("/usr/local/share/nbgrader"):
    print("LEAKED: the exchange")
