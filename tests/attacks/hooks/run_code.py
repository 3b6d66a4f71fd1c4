"""Replaces the shell's own way of running code by one that runs nothing and reports success.

passes: nothing
status: setup NOT_RUN
"""


# %% put="after imports"
async def run_code(self, code, result=None, *, async_=False):
    if result is not None:
        result.error_before_exec = result.error_in_exec = None
    return False


type(get_ipython()).run_code = run_code
