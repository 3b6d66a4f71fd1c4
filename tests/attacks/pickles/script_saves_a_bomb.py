"""The script's file announces arrays of a terabyte, and members that climb out of the archive.

base: reference
passes: everything but script
"""

# %% replaces="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_ddp.py
# import os
# import sys
# import zipfile
#
# out = next(a.partition("=")[2] for a in sys.argv if a.startswith("--out="))
# header = "{'descr': '<f8', 'fortran_order': False, 'shape': (131072, 1048576), }"
# raw = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n"
# if os.environ["RANK"] == "0":
#     with zipfile.ZipFile(out, "w") as archive:
#         for name in ("losses", "p0", "p1", "p2", "p3", "../../../../tmp/work/climbed"):
#             archive.writestr(f"{name}.npy", raw)
