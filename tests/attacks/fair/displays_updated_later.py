"""A display that later cells redraw, after prints that the grader has joined.

base: reference
passes: everything
"""

# %% put="after imports"
from IPython.display import display

for line in range(5):
    print(line, flush=True)
    sys.stderr.write("")
progress = display("1 %", display_id=True)
print("begun")

# %% put="after task1_setup"
progress.update("50 %")
progress.update("\ud800")

# %% put="last"
progress.update("100 %")
