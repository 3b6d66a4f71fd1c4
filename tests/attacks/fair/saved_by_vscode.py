"""Right, as VS Code saves it: its own metadata, sources as lists, execution counts.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook["nbformat_minor"] = 2
    notebook["metadata"] = {"orig_nbformat": 4, "vscode": {"interpreter": {"hash": "0"}}}
    for number, cell in enumerate(notebook["cells"], 1):
        cell["source"] = cell["source"].splitlines(keepends=True)
        cell["metadata"]["vscode"] = {"languageId": "python"}
        if cell["cell_type"] == "code":
            stream = {"output_type": "stream", "name": "stderr", "text": ["a warning\n"]}
            cell |= {"execution_count": number, "outputs": [stream]}
        del cell["id"]
    return notebook
