"""torch.save under the final name; what cannot be read is passed over.

loses: ckpt_atomic, ckpt_durable, ckpt_damage
class: example
because: the one line does none of the three things that task 3 asks for: rename, fsync, checksum.
"""

# %% replaces="task3_checkpointing" tags=["active-ipynb"]
# %%rank 0
# %%writefile checkpointing.py
# """Checkpoints with torch.save and nothing else."""
#
# from pathlib import Path
#
# import torch
#
#
# def save_checkpoint(folder, step, state, keep=3):
#     folder = Path(folder)
#     folder.mkdir(parents=True, exist_ok=True)
#     path = folder / f"step-{step:08d}.ckpt"
#     torch.save(state, path)
#     for old in sorted(folder.glob("step-*.ckpt"))[:-keep]:
#         old.unlink()
#     return path
#
#
# def load_newest(folder):
#     for path in sorted(Path(folder).glob("step-*.ckpt"), reverse=True):
#         try:
#             return int(path.stem[5:]), torch.load(path, map_location="cpu")
#         except Exception as error:
#             print(path, error)
#     return None
