"""Replaces the kernel's method that runs a cell by one that answers "ok" at once.

passes: nothing
"""


# %% put="after imports"
async def do_execute(self, code, silent, *arguments, **options):
    return {"status": "ok", "execution_count": 1, "payload": [], "user_expressions": {}}


type(get_ipython().kernel).do_execute = do_execute
