"""The Jupyter kernel "torchrun × N": every cell runs on N ranks.

`python -m minidist.kernel -f CONNECTION_FILE --ranks N` is what Jupyter starts. README.md in this
folder has the drawing, [Note: the life of a cell], and what is promised when something dies.
"""
