"""Variables that change what a later process loads: PYTHONPATH, LD_PRELOAD, the referee's path.

base: reference
passes: everything
"""

# %% put="last"
for name in ("LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "MINIDIST_REFEREE", "BASH_ENV"):
    os.environ[name] = "/tmp/work/evil.so"
os.putenv("AUTOGRADER_COURSE", "/tmp/work")
