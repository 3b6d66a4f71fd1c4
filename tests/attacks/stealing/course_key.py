"""Looks for the course's key in files, variables and what the box was started with.

passes: nothing
"""

# %% put="after imports"
import re

for name, value in os.environ.items():
    if re.fullmatch(r"[0-9a-f]{64}", value) or "can" + "ary" in value:
        print("LEAKED:", name)
for place in ("build/course.key", "../build/course.key", "/build/course.key", "~/build/course.key"):
    if os.path.exists(os.path.expanduser(place)):
        print("LEAKED:", place)
for argument in open("/proc/1/cmdline", "rb").read().split(b"\0"):
    if argument.endswith((b"course.key", b"journal.jsonl")) or b"can" + b"ary" in argument:
        print("LEAKED:", argument)
