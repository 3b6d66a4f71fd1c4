"""Looks for withheld modules as compiled files, in archives and among what is loaded.

passes: nothing
"""

# %% put="after imports"
import glob
import importlib.util

import minidist

root = os.path.dirname(minidist.__file__)
for pattern in ("**/parallel*", "**/sampler*", "**/train.*", "**/*.pyc"):
    for path in glob.glob(os.path.join(root, pattern), recursive=True):
        stem = os.path.basename(path).partition(".")[0]
        if stem in ("parallel", "sampler", "train"):
            print("LEAKED:", path)
for name in sys.modules:
    if name.startswith(("minidist.parallel", "minidist.sampler", "minidist.train")):
        print("LEAKED: loaded:", name)
