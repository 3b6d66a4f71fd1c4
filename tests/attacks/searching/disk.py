"""Walks the whole file system for keys, solutions, gradebooks, journals and notebooks.

passes: nothing
ci: yes
"""

# %% put="after imports"
SECRET = {"course.key", "gradebook.db", "journal.jsonl", "nbgrader_config.py", "launcher.json"}
SECRET |= {"referee.py", "zoo.py", "journal.py", "lab1_ddp.py.orig", "grades.csv"}
if IS_RANK_ZERO if "IS_RANK_ZERO" in globals() else os.environ["RANK"] == "0":
    for folder, folders, files in os.walk("/", followlinks=False):
        if folder == "/":
            folders[:] = [f for f in folders if f not in ("proc", "sys")]
        if "site-packages" in folder:  # nbgrader has examples of such files in its own package
            continue
        names = {"course.key", "gradebook.db", "journal.jsonl"}
        if "/autograder" in folder or "minidist" in folder or folder.startswith("/tmp"):
            names = SECRET
        for name in names & set(files):
            print("LEAKED:", folder, name)
        if "/minidist/" in folder and set(files) & {"bucketed.py", "naive.py", "sampler.py"}:
            print("LEAKED:", folder)
        if folder.endswith(("/solutions", "/tests/zoo", "/tests/attacks")):
            print("LEAKED:", folder)
