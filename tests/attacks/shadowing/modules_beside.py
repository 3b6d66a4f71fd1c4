"""Leaves modules named like the grader's in the working folder, then has the ranks start afresh.

passes: nothing
ci: yes
"""

# %% put="after imports"
NAMES = "torch numpy json socket autograder minidist ipykernel_launcher nbclient papermill hmac"
for name in NAMES.split():
    for place in (f"{name}.py", f"/tmp/{name}.py"):
        with open(place, "w") as file:
            file.write("def check(*_): print('shadow')\nprint('shadow')\n")

# %% put="after imports"
os._exit(0)
