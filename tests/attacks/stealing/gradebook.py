"""Opens every database that could be the gradebook and sets all scores to 150.

passes: nothing
ci: yes
"""

# %% put="after imports"
import sqlite3
from pathlib import Path

import autograder

places = [Path.cwd(), Path(autograder.__file__).parent.parent, Path("/"), Path.home()]
for place in [*places, *Path.cwd().parents]:
    for name in ("gradebook.db", "build/nbgrader/gradebook.db", "../gradebook.db"):
        path = place / name
        if path.exists():
            print("LEAKED: gradebook", path)
            sqlite3.connect(path).execute("update grade set auto_score = 150")
