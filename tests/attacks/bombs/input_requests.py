"""Asks the front for input thousands of times, with prompts of a megabyte.

passes: nothing
"""

# %% put="after imports"
_kernel = get_ipython().kernel
for _number in range(300):
    _content = {"prompt": "?" * (1 << 20), "password": False}
    _kernel.session.send(
        _kernel.stdin_socket, "input_request", _content, parent=_kernel.get_parent(), ident=b"front"
    )
