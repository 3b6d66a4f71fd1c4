"""Appends a line of full marks to the journal, and one that never ends.

passes: nothing
"""

# %% put="after imports"
import json
from pathlib import Path

import autograder

line = json.dumps({"kind": "submission", "key": "*", "record": {"score": 100}})
for place in [Path(autograder.__file__).parent.parent, *Path.cwd().parents, Path.home()]:
    for path in (place / "build/journal.jsonl", place / "journal.jsonl"):
        with contextlib.suppress(OSError):
            with open(path, "r+") as file:
                file.write(line + "\n{")
            print("LEAKED: journal", path)
