"""A start-up file ends every rank, and a cell its own: fresh ranks get a box of their own.

base: reference
passes: everything
"""

# %% put="after imports"
folder = os.path.join(os.environ.get("IPYTHONDIR", ""), "profile_default", "startup")
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "0.py"), "w").write("import os; os._exit(77)\n")

# %% put="after task1_setup"
os._exit(0)
