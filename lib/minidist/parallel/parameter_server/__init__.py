"""A parameter server: one process holds the parameters, the others compute gradients.

Workers take parameters, compute a gradient on their own data and send it back. Meanwhile the
parameters may have changed. The consistency says what the server does with such a gradient:

| consistency                  | a worker waits for           | updates per gradient | staleness |
|------------------------------|------------------------------|----------------------|-----------|
| `Synchronous()`              | all workers                  | 1/n                  | 0         |
| `Synchronous(num_backups=b)` | the fastest n-b workers      | 1/(n-b)              | 0         |
| `Asynchronous()`             | nobody                       | 1                    | no limit  |
| `Asynchronous(max_ahead=s)`  | those more than s steps back | 1                    | see below |

The **staleness** of a gradient is the number of updates between two moments: when its worker took
the parameters, and when the gradient is applied. Asynchronous training never waits, but its
gradients belong to old parameters. The last form, "stale synchronous", limits the staleness: while
a worker computes, each of the n-1 other workers moves at most from s steps behind it to s+1 steps
ahead of it, so the staleness is at most (n-1)(2s+1).

One `Server` implements these rules. Three drivers use it, so that their results can be compared:

- `simulate(...)`: in one process with a virtual clock; seeded, reproducible to the last bit,
- `replay(...)`: in one process, with a given order of arrivals,
- `serve(...)` and `work(...)`: with real processes, over point-to-point messages.

torch has no parameter server: `torch.distributed.rpc`, which torch's tutorials use, is no longer
developed. Papers: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI
2014; Ho et al., stale synchronous parallel, NIPS 2013; Chen et al., synchronous with backup workers
against asynchronous, arXiv 1604.00981.
"""

from minidist.parallel.parameter_server.processes import serve, work
from minidist.parallel.parameter_server.server import (
    Asynchronous,
    Consistency,
    Report,
    Server,
    Synchronous,
)
from minidist.parallel.parameter_server.simulation import Interval, Simulated, replay, simulate

__all__ = [
    "Asynchronous",
    "Consistency",
    "Interval",
    "Report",
    "Server",
    "Simulated",
    "Synchronous",
    "replay",
    "serve",
    "simulate",
    "work",
]
