"""NUL bytes, half surrogates, text that runs backwards and cells of unknown types.

passes: nothing
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    for number, source in enumerate(
        ("x = '\0'", "y = '\ud800'", "# \u202e\u2066 evil\u2028x", "\0")
    ):
        cell = {"cell_type": ("code", "heading", "raw", "code")[number], "metadata": {}}
        notebook["cells"].insert(0, cell | {"id": "\ud800", "source": source, "outputs": []})
    return notebook
