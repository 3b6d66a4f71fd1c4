"""Names a kernel of its own, with a command in its metadata, and another language.

same as: starter
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook["metadata"] = {
        "kernelspec": {"name": "python3", "argv": ["sh", "-c", "id"], "display_name": "P"},
        "language_info": {"name": "bash"},
        "papermill": {"parameters": {"check": "print"}, "version": "2.7.0"},
        "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}},
    }
    return notebook
