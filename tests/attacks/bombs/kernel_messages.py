"""Two gigabytes of messages to the front, each within its bound, faster than they can be read.

passes: nothing
"""

# %% put="after imports"
import time

import zmq

if os.environ["RANK"] == "0":
    _kernel = get_ipython().kernel
    _session = _kernel.session
    _parent = _session.pack(_kernel.get_parent()["header"])
    _content = b'{"data": {"text/plain": "' + b"x" * (50 << 20) + b'"}, "metadata": {}}'
    _place = f"ipc://{os.environ['MINIDIST_RUN_DIR']}/{os.environ['MINIDIST_GENERATION']}"
    _sock = zmq.Context.instance().socket(zmq.PUSH)
    _sock.sndhwm = 1
    _sock.connect(f"{_place}-iopub-0")
    for _ in range(40):
        _parts = [_session.pack(_session.msg_header("display_data")), _parent, b"{}", _content]
        with contextlib.suppress(zmq.Again):
            _sock.send_multipart([b"x", b"<IDS|MSG>", _session.sign(_parts), *_parts], zmq.NOBLOCK)
        time.sleep(0.05)
    _sock.close(0)
