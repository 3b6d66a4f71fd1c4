"""The output of a run: a bar on a terminal, lines elsewhere, one JSON object per step in a file.

Only rank 0 writes. Speed is tokens per second of all ranks together and, if the peak of the device
is known, the share of this peak that the model's FLOPs use (MFU). `minidist.cost` has the
arithmetic for attention and recomputation.

>>> bar(3, 12, width=8)
'[##......] 3/12'
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from minidist.cost.hardware import find_gpu
from minidist.cost.transformer import Transformer


def bar(done: int, total: int, width: int = 24) -> str:
    full = width * done // total
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total}"


def peak_flops_per_s(device: torch.device, compute_dtype: torch.dtype) -> float | None:
    """Peak of one device for matrix products of a dtype, in FLOP/s; None if unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = find_gpu(properties.name, properties.total_memory)
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(compute_dtype)
    return None if gpu is None else gpu.peak_flops_per_s.get(str(kind))


class Report:
    """Shows and stores the records of a run. Every rank creates a Report; only rank 0 writes.

    Args:
        rank: of this process.
        num_steps: of the whole run.
        first_step: number of steps done by earlier runs. Records of later steps are removed from
            the file, because this run repeats these steps.
        peak: FLOP/s of all ranks together; None if unknown.
        path: of the JSON lines; None writes no file.
        log_every: steps between lines if stdout is not a terminal.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_steps: int,
        first_step: int,
        tokens_per_step: int,
        model: Transformer,
        peak: float | None,
        path: Path | None,
        log_every: int,
        quiet: bool,
    ) -> None:
        self.num_steps, self.tokens_per_step, self.log_every = num_steps, tokens_per_step, log_every
        self.model, self.peak = model, peak
        self.shows = rank == 0 and not quiet
        self.is_terminal = sys.stdout.isatty()
        self._file: Any = None
        if path is not None and rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_after(path, first_step)
        self._clock_s = time.perf_counter()

    def speed(self) -> dict[str, float]:
        """Speed of the step that ends now. The step began at the last `restart_clock`."""
        rate = self.tokens_per_step / (time.perf_counter() - self._clock_s)
        if self.peak is None:
            return {"tokens_per_s": round(rate, 1)}
        mfu = rate * self.model.flops_per_token() / self.peak
        return {"tokens_per_s": round(rate, 1), "mfu": round(mfu, 4)}

    def restart_clock(self) -> None:
        """Call it before a step, so that the time of evaluations and checkpoints does not count."""
        self._clock_s = time.perf_counter()

    def step(self, record: dict[str, Any]) -> None:
        """Write the record of a step: {"step": number of steps done, "loss": ...}."""
        if self._file is not None:
            # JSON has no inf and nan, but the record of a skipped fp16 step may contain them.
            finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        step = record["step"]
        if self.shows and self.is_terminal:
            # Cut the text to one line, because "\r" cannot overwrite several lines.
            line = self._line(record)[: shutil.get_terminal_size().columns - 1]
            sys.stdout.write(f"\r\x1b[K{line}")
            if "eval_loss" in record or step == self.num_steps:
                sys.stdout.write("\n")
            sys.stdout.flush()
        elif self.shows and (step % self.log_every == 0 or step in (1, self.num_steps)):
            print(self._line(record), flush=True)

    def say(self, text: str) -> None:
        if self.shows:
            print(text, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, record: dict[str, Any]) -> str:
        parts = [bar(record["step"], self.num_steps), f"loss {record['loss']:.4f}"]
        if "eval_loss" in record:
            parts.append(
                f"eval {record['eval_loss']:.4f} (perplexity {record['eval_perplexity']:.2f})"
            )
        parts += [f"lr {record['lr']:.2e}", f"norm {record['grad_norm']:.2f}"]
        if "imbalance" in record:
            parts.append(f"imbalance {record['imbalance']:.2f}  dropped {record['dropped']:.1%}")
        if "scale" in record:
            parts.append(f"scale {record['scale']:g}")
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in record:
            parts.append(f"MFU {record['mfu']:.1%}")
        return "  ".join(parts)


def _open_after(path: Path, step: int) -> Any:
    """Remove the records after `step` from the file, and open the file for appending."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if _is_whole(line) and json.loads(line)["step"] <= step]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a")


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:  # an earlier run ended while it wrote this line
        return False
    return True
