"""Displays that set the cell's number to a piece of HTML.

base: reference
passes: everything
"""

# %% put="after imports"
_kernel = get_ipython().kernel
for _number in ("<script>alert(1)</script>", {"a": 1}, -1, None, 1e99):
    _content = {"data": {"text/plain": "x"}, "metadata": {}, "execution_count": _number}
    _kernel.session.send(
        _kernel.iopub_socket, "display_data", _content, parent=_kernel.get_parent(), ident=b"x"
    )
