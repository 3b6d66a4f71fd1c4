"""Keeps a list of what this process has saved: after a restart the older ones stay for ever.

loses: ckpt_atomic, ckpt_keep
because: a process that goes on after a death has saved nothing yet, so the old ones stay then, too.
"""


# %% replaces="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# """Checkpoints that survive the death of a process, of a node, and of a few bits."""
#
# import hashlib
# import io
# import os
# from pathlib import Path
#
# import torch
#
# SAVED = {}
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     """Saves `state` as FOLDER/step-00000012.ckpt, whole or not at all; returns the path.
#
#     Then deletes the oldest checkpoints, so that the newest `keep` are left.
#     """
#     ### BEGIN SOLUTION
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     path = folder / f"step-{step:08d}.ckpt"
#
#     buffer = io.BytesIO()
#     torch.save(state, buffer)
#     data = buffer.getvalue()
#
#     # 1. Everything into a file of another name, and that onto the disk.
#     temporary = path.with_name(path.name + ".tmp")
#     with open(temporary, "wb") as file:
#         file.write(hashlib.sha256(data).digest())  # 32 bytes
#         file.write(data)
#         file.flush()
#         os.fsync(file.fileno())
#
#     # 2. The name, all at once; and the folder's list of names onto the disk too.
#     os.replace(temporary, path)
#     fd = os.open(folder, os.O_RDONLY)
#     try:
#         os.fsync(fd)
#     finally:
#         os.close(fd)
#
#     # 3. Only now may old ones go. Names have eight digits, so their order is that of the steps.
#     mine = SAVED.setdefault(folder, [])
#     if path not in mine:
#         mine.append(path)
#     for old in mine[:-keep]:
#         old.unlink(missing_ok=True)
#     del mine[:-keep]
#     return path
#     ### END SOLUTION
#
#
# def load_newest(folder):
#     """(step, state) of the newest checkpoint that is whole, tensors on the CPU; None without one.
#
#     A damaged one is passed over, and the one before it is tried.
#     """
#     ### BEGIN SOLUTION
#     for path in sorted(Path(folder).glob("step-*.ckpt"), reverse=True):
#         content = path.read_bytes()
#         digest, data = content[:32], content[32:]
#         if hashlib.sha256(data).digest() != digest:
#             print(f"{path.name} is damaged, trying the one before")
#             continue
#         step = int(path.stem.removeprefix("step-"))
#         return step, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
#     return None
#     ### END SOLUTION
