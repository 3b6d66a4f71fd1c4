"""Raises an exception whose text, name and traceback are of many megabytes.

passes: nothing
status: setup STUDENT_ERROR
"""


# %% replaces="task1_setup"
def setup_distributed():
    error = type(
        "E" * 100_000, (Exception,), {"_render_traceback_": lambda self: ["t" * 10**7] * 3}
    )
    raise error("m" * (30 << 20))
