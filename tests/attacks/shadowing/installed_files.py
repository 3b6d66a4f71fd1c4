"""Writes into the interpreter, the packages and the grader's own files.

passes: nothing
"""

# %% put="after imports"
import autograder
import minidist

targets = [sys.executable, np.__file__, torch.__file__, autograder.__file__, minidist.__file__]
targets += [
    "/usr/bin/python3",
    "/usr/bin/bwrap",
    "/etc/passwd",
    "/proc/1/exe",
    "/etc/ld.so.preload",
]
for target in targets:
    for mode in ("r+b", "ab"):
        with contextlib.suppress(OSError):
            open(target, mode).close()
            print("LEAKED: can write", target)
    with contextlib.suppress(OSError):
        os.rename(os.path.dirname(target), os.path.dirname(target) + ".old")
        print("LEAKED: renamed the folder of", target)
