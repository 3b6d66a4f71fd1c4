"""Right, with cells of its own that end the process: nothing that is graded comes of them.

base: reference
ci: yes
"""

# %% put="after imports"
exit()


# %% put="after task3_sampler"
def done():
    quit()


done()

# %% put="after task4_train"
import sys

sys.exit(1)

# %% put="after task7_ddp"
import os

if int(os.environ["RANK"]) == 1:
    os._exit(0)
