"""Outputs that are text, metadata that is a number, a minor version in words: other readers stop.

same as: starter
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook |= {"metadata": 7, "nbformat_minor": "five"}
    for number, cell in enumerate(notebook["cells"]):
        cell["attachments"] = ["x"]
        if cell["cell_type"] == "code":
            cell["outputs"] = ["x", 7, None, {"output_type": 3}]
            cell["execution_count"] = {"n": number}
        if not cell["metadata"]:
            cell["metadata"] = None
    return notebook
