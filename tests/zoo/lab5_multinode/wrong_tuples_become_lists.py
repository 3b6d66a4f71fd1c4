"""A tuple in the state comes back as a list.

loses: ckpt_roundtrip
"""


# %% replaces="task3_checkpointing"
# %%rank 0
# %%writefile checkpointing.py
# import hashlib
# import io
# import os
# import re
# from pathlib import Path
#
# import torch
#
#
# def numbered(folder):
#     found = []
#     for path in Path(folder).iterdir():
#         match = re.fullmatch(r"step-(\d{8})\.ckpt", path.name)
#         if match:
#             found.append((int(match[1]), path))
#     return sorted(found)
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     path = folder / f"step-{step:08d}.ckpt"
#     temporary = folder / f"{path.name}.tmp"
#     buffer = io.BytesIO()
#     torch.save(state, buffer)
#     data = buffer.getvalue()
#     with open(temporary, "wb") as file:
#         file.write(hashlib.sha256(data).digest() + data)
#         file.flush()
#         os.fsync(file.fileno())
#     os.replace(temporary, path)
#     directory = os.open(folder, os.O_RDONLY)
#     os.fsync(directory)
#     os.close(directory)
#     for _, old in numbered(folder)[:-keep]:
#         old.unlink()
#     return path
#
#
# def load_newest(folder):
#     if not Path(folder).is_dir():
#         return None
#     for step, path in reversed(numbered(folder)):
#         try:
#             content = path.read_bytes()
#             if hashlib.sha256(content[32:]).digest() != content[:32]:
#                 continue
#             state = torch.load(io.BytesIO(content[32:]), map_location="cpu", weights_only=True)
#         except Exception:
#             continue
#         def plain(value):
#             if isinstance(value, (list, tuple)):
#                 return [plain(each) for each in value]
#             if isinstance(value, dict):
#                 return {key: plain(each) for key, each in value.items()}
#             return value
#
#         return step, plain(state)
#     return None
