"""A zip archive whose member climbs out of the folder it is unpacked in.

invalid: not
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../../../../tmp/climbed", "out")
    return buffer.getvalue()
