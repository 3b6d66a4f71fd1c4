"""Right, with the line endings of another system and a byte-order mark.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import json

    for number, cell in enumerate(notebook["cells"]):
        cell["source"] = cell["source"].replace("\n", ("\r\n", "\r", "\n")[number % 3])
    text = json.dumps(notebook, indent=1, ensure_ascii=False).replace("\n", "\r\n")
    return b"\xef\xbb\xbf" + text.encode()
