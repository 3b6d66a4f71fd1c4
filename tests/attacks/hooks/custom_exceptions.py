"""Swallows every exception that a cell raises, so that no check ends in an error.

passes: nothing
status: setup STUDENT_ERROR
"""


# %% put="after imports"
def swallow(shell, kind, error, traceback, tb_offset=None):
    print("✓ 5/5")


get_ipython().set_custom_exc((BaseException,), swallow)
