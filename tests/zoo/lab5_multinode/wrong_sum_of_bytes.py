"""The sum of all bytes as a checksum: two that change places are not noticed.

loses: ckpt_damage
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
#         file.write(sum(data).to_bytes(32, 'big') + data)
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
#             if sum(content[32:]).to_bytes(32, 'big') != content[:32]:
#                 continue
#             state = torch.load(io.BytesIO(content[32:]), map_location="cpu", weights_only=True)
#         except Exception:
#             continue
#         return step, state
#     return None
