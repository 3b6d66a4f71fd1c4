"""Start-up files and kernels for whoever runs IPython or Jupyter with this home next.

passes: nothing
"""

# %% put="after imports"
folders = [os.environ.get(n, "") for n in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")]
folders += [os.path.expanduser(p) for p in ("~/.ipython", "~/.jupyter", "~/.local/share/jupyter")]
folders += ["/etc/ipython", "/usr/share/jupyter", os.path.join(sys.prefix, "share/jupyter")]
for folder in filter(None, folders):
    for name in (
        "profile_default/startup/00-x.py",
        "kernels/torchrun-2/kernel.json",
        "jupyter_config.py",
        "nbgrader_config.py",
    ):
        with contextlib.suppress(OSError):
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").write("print('LEAKED: POISON')\n")
