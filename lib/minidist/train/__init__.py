"""Train a GPT on any layout of ranks: one program that uses all parts of the course.

::

    torchrun --nproc-per-node 4 -m minidist.train --dp 2 --tp 2 --zero 1 --precision bf16 \\
        --steps 50 --global-batch 16 --micro-batch 2 --out runs/first

1. config    all settings of the run; checked before any communication (`config`)
2. mesh      rank <-> dp, pp, cp, tp, and a process group per axis (`minidist.mesh`)
3. model     the same weights on every rank, from one seed (`minidist.model`)
4. shards    layers over tp, sequences over cp, blocks over pp, states over dp, experts over ep
             (`parallel.hybrid`)
5. loader    step k has the same samples for any number of ranks (`minidist.sampler`)
6. resume    from a checkpoint of any layout; with the same layout bit for bit (`resume`)
7. loop      forward, backward, mean over ranks, unscale, clip, update (`program.loop`)
8. evaluate  each sequence once, the mean over all tokens
9. report    progress bar or lines, tokens per second, metrics.jsonl (`report`)
10. end      SIGTERM on any rank: all ranks save, then end (`minidist.elastic`)

The loss curve does not depend on the layout, except for rounding. From a program or a notebook::

    losses = train(TrainConfig(tp=2, steps=20))     # on every rank of the process group

With experts (`--num-experts 8 --top-k 2 --ep 2`) a record of metrics.jsonl also has the load of the
fullest expert divided by the mean and the share of choices that were dropped. With a capacity or an
auxiliary loss the curve depends on which sequences pass through the model at once; without them, it
is the curve of one process.
"""

from minidist.train.config import TrainConfig, parse_args
from minidist.train.program import build_trainer, evaluate, train

__all__ = ["TrainConfig", "build_trainer", "evaluate", "parse_args", "train"]
