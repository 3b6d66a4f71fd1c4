"""Run by torchrun in test_elastic.py: trains, dies where it is told to, and writes its losses."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from minidist.checkpoint import Checkpoints
from minidist.data import make_regression
from minidist.elastic import Preemption, restart_count, share_of_batch, train_elastically

BATCH = 12


class RandomNumbers:
    def state_dict(self):
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])


def main(folder: Path, num_steps: int, die: str) -> None:
    if die == "node" and os.environ["WORLD_SIZE"] == "1" and not any(folder.glob("losses-*-2.*")):
        time.sleep(60)  # until the other node, which is late, joins: then the workers begin anew
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(0.0 if die in ("node", "no dropout") else 0.1)
    ).double()
    model.append(nn.Linear(32, 2).double())
    torch.manual_seed(1000 + rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    inputs, targets = (t.double() for t in make_regression(BATCH * num_steps, 8, 2))
    mine = share_of_batch(BATCH, world_size, rank)
    log = folder / f"losses-{restart_count()}-{world_size}.jsonl"

    def step(number: int) -> None:
        if die == f"rank 1 at {number}" and rank == 1 and restart_count() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if die == f"term at {number}" and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        batch = slice(number * BATCH + mine.start, number * BATCH + mine.stop)
        loss = (model(inputs[batch]) - targets[batch]).square().sum() / (BATCH * 2)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for tensor in [total, *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor)
        optimizer.step()
        scheduler.step()
        if rank == 0:
            with log.open("a") as file:
                file.write(json.dumps([number, total.item()]) + "\n")
        if die == "node":  # slowly, so that there is something left to kill
            time.sleep(0.05)

    with Preemption() as preemption:
        ended = train_elastically(
            step,
            num_steps=num_steps,
            checkpoints=Checkpoints(folder / "checkpoints"),
            shared={"model": model, "optimizer": optimizer, "scheduler": scheduler},
            local={"rng": RandomNumbers()},
            every=4,
            preemption=preemption,
        )
    if rank == 0:
        (folder / "ended.json").write_text(
            json.dumps([ended.step, ended.first_step, ended.preempted, world_size])
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
