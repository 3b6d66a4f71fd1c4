"""A parameter server: one process holds the parameters, the others compute gradients.

Workers take parameters, compute a gradient on their own data and send it back. The question is what
the server does with a gradient that was computed from parameters which have changed since:

| consistency                  | a worker waits for           | updates per gradient | staleness |
|------------------------------|------------------------------|----------------------|-----------|
| `Synchronous()`              | all workers                  | 1/n                  | 0         |
| `Synchronous(num_backups=b)` | the fastest n-b workers      | 1/(n-b)              | 0         |
| `Asynchronous()`             | nobody                       | 1                    | no limit  |
| `Asynchronous(max_ahead=s)`  | those more than s steps back | 1                    | see below |

The **staleness** of a gradient is the number of updates between the moment its worker took the
parameters and the moment it is applied. Asynchronous training never waits, but its gradients are
for parameters of the past. The last form, "stale synchronous", bounds that: while a worker
computes, each of the n-1 others gets at most from s steps behind it to s+1 ahead, so staleness is
at most (n-1)(2s+1).

One `Server` holds these rules and is driven in three ways, so that they can be compared:

- `simulate(...)`: in one process with a virtual clock; seeded, reproducible to the last bit,
- `replay(...)`: in one process, in an order of arrivals that is given,
- `serve(...)` and `work(...)`: with real processes, over point-to-point messages.

There is no torch-native form: `torch.distributed.rpc`, which its tutorials use, is no longer
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
