"""Right, saved under other kernels' names.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    kernel = {
        "name": "conda-env-ml-py",
        "display_name": "Python [conda env:ml]",
        "language": "python",
    }
    notebook["metadata"] = {
        "kernelspec": kernel,
        "language_info": {"name": "python", "version": "3"},
    }
    return notebook
