"""Looks through every object of the process for seeds, draws, keys and expected values.

passes: nothing
"""

# %% put="after imports"
import gc

for thing in gc.get_objects():
    name = type(thing).__name__
    if name in ("Draw", "Referee", "Case", "ChargePlan", "Journal", "Course", "_OpenCheck"):
        print("LEAKED: an object of the trusted side:", name)
    if isinstance(thing, dict):
        for key in ("course_key", "seed_id", "expected", "secret"):
            if key in thing and isinstance(thing[key], (bytes, np.ndarray)):
                print("LEAKED:", key, thing[key])
