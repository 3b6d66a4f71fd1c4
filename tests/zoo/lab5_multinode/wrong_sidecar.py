"""The checksum is in a file of its own: a checkpoint that is copied without it is lost.

loses: ckpt_atomic, ckpt_roundtrip
because: between the two files, a death leaves a checkpoint without its checksum.
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
#         file.write(data)
#         file.flush()
#         os.fsync(file.fileno())
#
#     # 2. The name, all at once; and the folder's list of names onto the disk too.
#     os.replace(temporary, path)
#     Path(str(path) + ".sha256").write_text(hashlib.sha256(data).hexdigest())
#     fd = os.open(folder, os.O_RDONLY)
#     try:
#         os.fsync(fd)
#     finally:
#         os.close(fd)
#
#     # 3. Only now may old ones go. Names have eight digits, so their order is that of the steps.
#     for old in sorted(folder.glob("step-*.ckpt"))[:-keep]:
#         old.unlink()
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
#         data, digest = path.read_bytes(), Path(str(path) + ".sha256")
#         if not digest.is_file() or hashlib.sha256(data).hexdigest() != digest.read_text():
#             print(f"{path.name} is damaged, trying the one before")
#             continue
#         step = int(path.stem.removeprefix("step-"))
#         return step, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
#     return None
#     ### END SOLUTION
