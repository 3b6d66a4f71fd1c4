"""A display nested so deeply that whoever copies or checks it runs out of stack.

base: reference
passes: everything
"""

# %% put="after imports"
_deep = []
for _ in range(400):
    _deep = [_deep]
display({"application/json": _deep, "text/plain": "deep"}, raw=True)
_deep = {}
for _ in range(300):
    _deep = {"a": _deep}
display({"application/json": {}, "text/plain": "deep"}, raw=True, metadata=_deep)
