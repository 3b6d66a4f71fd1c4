"""Replies to the cell whose parts the front can read, and who reads them next cannot: too deep.

base: reference
passes: everything
"""

# %% put="after imports"
import zmq

_kernel = get_ipython().kernel
_session = _kernel.session
_run_dir, _generation = os.environ["MINIDIST_RUN_DIR"], os.environ["MINIDIST_GENERATION"]
if os.environ["RANK"] == "0":
    _parent = _session.pack(_kernel.get_parent()["header"])
    _deep = b"[" * 940 + b"]" * 940
    _content = b'{"status": "ok", "payload": [], "user_expressions": {"x": %s}}' % _deep
    _parts = [_session.pack(_session.msg_header("execute_reply")), _parent, b"{}", _content]
    _sock = zmq.Context.instance().socket(zmq.DEALER)
    _sock.connect(f"ipc://{_run_dir}/{_generation}-shell-0")
    _sock.send_multipart([b"<IDS|MSG>", _session.sign(_parts), *_parts])
    _sock.close(500)
