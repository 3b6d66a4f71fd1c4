"""sitecustomize, usercustomize and .pth files in every place that Python might look at.

passes: nothing
"""

# %% put="after imports"
import site
import subprocess

text = "print('LEAKED: a start-up file was run')\n"
places = [os.getcwd(), os.path.expanduser("~"), site.getusersitepackages(), sys.prefix, "/tmp"]
places += site.getsitepackages()
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py"):
        with contextlib.suppress(OSError):
            os.makedirs(place, exist_ok=True)
            open(os.path.join(place, name), "w").write(text)
    with contextlib.suppress(OSError):
        open(os.path.join(place, "x.pth"), "w").write(f"import sys; {text}")
os._exit(0)
