"""os.open and os.write, a temporary file of tempfile's, a JSON header with a CRC.

loses: nothing
"""

# %% replaces="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# import io
# import json
# import os
# import re
# import tempfile
# import zlib
#
# import torch
#
# NAME = re.compile(r"step-(\d{8})\.ckpt")
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     folder = os.fspath(folder)
#     os.makedirs(folder, exist_ok=True)
#     buffer = io.BytesIO()
#     torch.save(state, buffer)
#     data = buffer.getbuffer()
#     header = json.dumps({"crc": zlib.crc32(data), "size": len(data), "step": step})
#     fd, temporary = tempfile.mkstemp(dir=folder, prefix="writing-")
#     try:
#         for piece in (header.encode().ljust(128), data):
#             while piece:
#                 piece = piece[os.write(fd, piece) :]
#         os.fsync(fd)
#     finally:
#         os.close(fd)
#     path = os.path.join(folder, f"step-{step:08d}.ckpt")
#     os.rename(temporary, path)
#     for old in steps_in(folder)[keep:]:
#         os.remove(os.path.join(folder, f"step-{old:08d}.ckpt"))
#     return path
#
#
# def steps_in(folder):
#     if not os.path.isdir(folder):
#         return []
#     matches = (NAME.fullmatch(name) for name in os.listdir(folder))
#     return sorted((int(match[1]) for match in matches if match), reverse=True)
#
#
# def load_newest(folder):
#     for step in steps_in(folder):
#         with open(os.path.join(folder, f"step-{step:08d}.ckpt"), "rb") as file:
#             header, data = file.read(128), file.read()
#         try:
#             header = json.loads(header)
#             if header == {"crc": zlib.crc32(data), "size": len(data), "step": step}:
#                 return step, torch.load(io.BytesIO(data), map_location="cpu")
#         except ValueError:
#             pass
#     return None
