"""Right, from a JupyterLab that knew no cell ids, with collapsed and scrolled cells.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook["nbformat_minor"] = 4
    for cell in notebook["cells"]:
        del cell["id"]
        cell["metadata"] |= {
            "collapsed": True,
            "scrolled": False,
            "jupyter": {"source_hidden": True},
        }
        cell["metadata"] |= {"deletable": False, "editable": False, "tags": []}
    return notebook
