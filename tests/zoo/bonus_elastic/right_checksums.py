"""Files with a checksum, written by way of a folder; a table of bits says what is whole.

loses: nothing
class: example
"""

# %% replaces="task3_saving"
import hashlib
import re


def save_together(folder, step, state, keep=3):
    folder = Path(folder)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as place:
            path = Path(place, "whole")
            path.write_bytes(hashlib.sha256(data).digest() + data)
            path.rename(folder / f"step-{step:08d}.pt")
        for leftover in folder.glob(".saving-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for old in steps_in(folder)[keep:]:
            Path(folder, f"step-{old:08d}.pt").unlink()
    told = [step]
    dist.broadcast_object_list(told, src=0)  # nobody passes before rank 0 is here


def steps_in(folder):
    names = [re.fullmatch(r"step-(\d{8})\.pt", p.name) for p in Path(folder).iterdir()]
    return sorted((int(name[1]) for name in names if name), reverse=True)


def content(folder, step):
    whole = Path(folder, f"step-{step:08d}.pt").read_bytes()
    return whole[32:] if hashlib.sha256(whole[32:]).digest() == whole[:32] else None


def load_together(folder):
    mine = steps_in(folder) if Path(folder).is_dir() else []
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    steps = sorted(set().union(*lists), reverse=True)
    bits = [step in mine and content(folder, step) is not None for step in steps]
    table = torch.tensor([*bits, True], dtype=torch.int32, device=choose_device())
    dist.all_reduce(table, op=dist.ReduceOp.PRODUCT)
    there = [step for step, bit in zip(steps, table.tolist()[:-1], strict=True) if bit]
    if not there:
        return None
    return there[0], torch.load(io.BytesIO(content(folder, there[0])), map_location="cpu")
