"""Right, as Colab saves it: ids and outputs in its own metadata, format 4.0.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook["nbformat_minor"] = 0
    notebook["metadata"] = {"colab": {"provenance": [], "toc_visible": True}, "accelerator": "GPU"}
    for number, cell in enumerate(notebook["cells"]):
        del cell["id"]
        cell["metadata"] |= {
            "id": f"x{number}",
            "colab": {"base_uri": "https://x"},
            "outputId": "y",
        }
    return notebook
