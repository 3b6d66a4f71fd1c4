"""The script saves pickled objects instead of numbers: whoever loads them runs a command.

base: reference
passes: everything but script
status: script STUDENT_ERROR
"""

# %% replaces="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_ddp.py
# import os
# import sys
#
# import numpy as np
#
#
# class Evil:
#     def __reduce__(self):
#         return (print, ("LEAKED: a pickle was loaded",))
#
#
# out = next(a.partition("=")[2] for a in sys.argv if a.startswith("--out="))
# if os.environ["RANK"] == "0":
#     evil = np.array([Evil()], dtype=object)
#     np.savez(out, losses=evil, p0=evil, p1=evil, p2=evil, p3=evil)
