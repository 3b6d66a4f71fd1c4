"""Ends the cell's output early and shows results of its own, signed like the real ones.

passes: nothing
"""

# %% put="before setup"
kernel = get_ipython().kernel
session = kernel.session
for parent in (kernel.get_parent(), {}):
    for kind, content in (
        ("status", {"execution_state": "idle"}),
        ("execute_result", {"data": {"text/plain": "✓ 5/5"}, "metadata": {}, "execution_count": 1}),
        ("error", {"ename": "", "evalue": "", "traceback": []}),
        ("clear_output", {"wait": False}),
        ("update_display_data", {"data": {}, "metadata": {}, "transient": {"display_id": "x"}}),
        ("shutdown_reply", {"restart": False}),
    ):
        session.send(kernel.iopub_socket, kind, content, parent=parent, ident=b"x")
