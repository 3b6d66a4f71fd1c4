"""Signed messages whose content is no JSON, sent outside of any cell.

Whoever passes them on unread has the notebook's client fail, and with it the grading.

base: reference
passes: everything
"""

# %% put="after imports"
import json

_kernel = get_ipython().kernel
_session = _kernel.session


def _raw(kind, content, parent=b"{}"):
    head = _session.pack(_session.msg_header(kind))
    parts = [head, parent, b"{}", content]
    frames = [kind.encode(), b"<IDS|MSG>", _session.sign(parts), *parts]
    _kernel.iopub_socket.send_multipart(frames)


for _content in (b"not JSON", b"", b"[]", b"null", b'{"a": ', b"\xff\xfe", b"[" * 5000):
    for _kind in ("stream", "display_data", "status", "comm_open"):
        _raw(_kind, _content)
        _raw(_kind, _content, _session.pack(_kernel.get_parent()["header"]))
