"""ZeRO from scratch (arXiv 1910.02054): N ranks together hold one copy instead of N copies.

    stage   sharded                            class                 file
    1       optimiser state                    ShardedOptimizer      stage1.py
    2       + gradients                        Zero2Optimizer        stage2.py
    3       + parameters                       Zero3                 stage3.py, unit.py, flat.py
    3 with Muon, LAMB, ...                     WholeOptimizer        whole.py

Read partition.py (which rank owns what) and exchange.py (how rows move) first; both are short.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
