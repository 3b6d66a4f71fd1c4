"""Signs output that a notebook client cannot take apart: twice the same, odd dates and versions.

passes: nothing
"""

# %% put="before setup"
import json

kernel = get_ipython().kernel
session, parent = kernel.session, kernel.get_parent()
content = session.pack({"name": "stdout", "text": "x"})
for change in ({}, {"date": "2020-99-99T99:99:99"}, {"version": 5}, {"version": None}):
    header = json.loads(session.pack(session.msg_header("stream"))) | change
    for above in (parent["header"], {**parent["header"], **change}):
        parts = [session.pack(header), session.pack(above), b"{}", content]
        frames = [b"x", b"<IDS|MSG>", session.sign(parts), *parts]
        kernel.iopub_socket.send_multipart(frames)
        kernel.iopub_socket.send_multipart(frames)
deep = "[" * 600 + "]" * 600
parts = [session.pack(session.msg_header("display_data")), session.pack(parent["header"]), b"{}"]
parts.append(('{"data": {"application/json": %s}, "metadata": {}}' % deep).encode())
kernel.iopub_socket.send_multipart([b"x", b"<IDS|MSG>", session.sign(parts), *parts])
