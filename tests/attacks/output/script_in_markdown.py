"""Writes scripts into the text cells, which feedback and formgrader show as HTML.

passes: nothing
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    evil = (
        "<script>OWNED</script> <img src=x onerror=OWNED> [x](javascript:OWNED)\n"
        "<svg onload=OWNED></svg> <iframe src='javascript:OWNED'></iframe> <b onclick=OWNED>b</b>"
    )
    for number, kind in enumerate(("markdown", "raw", "markdown")):
        cell = {"cell_type": kind, "id": f"evil{number}", "metadata": {}, "source": evil}
        notebook["cells"].insert(0, cell | {"attachments": {"x": {"text/html": evil}}})
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("solution") and cell["cell_type"] != "code":
            cell["source"] = evil
    return notebook
