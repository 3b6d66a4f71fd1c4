"""Output with half a surrogate pair, which cannot be written as UTF-8, and numbers without end.

base: reference
passes: everything
"""

# %% put="after imports"
_kernel = get_ipython().kernel
_session = _kernel.session
_parent = _session.pack(_kernel.get_parent()["header"])
for _kind, _content in (
    ("stream", rb'{"name": "stdout", "text": "\ud800"}'),
    ("display_data", rb'{"data": {"text/plain": "\udfff", "\ud800": 1}, "metadata": {}}'),
    ("display_data", rb'{"data": {"text/plain": "x"}, "metadata": {"n": NaN, "i": -Infinity}}'),
    (
        "execute_result",
        rb'{"data": {"a": 1e999}, "metadata": {"\ud800": {}}, "execution_count": 1}',
    ),
    ("display_data", rb'{"data": {"text/plain": 7}, "metadata": null, "transient": 3}'),
):
    _parts = [_session.pack(_session.msg_header(_kind)), _parent, b"{}", _content]
    _frames = [_kind.encode(), b"<IDS|MSG>", _session.sign(_parts), *_parts]
    _kernel.iopub_socket.send_multipart(_frames)
