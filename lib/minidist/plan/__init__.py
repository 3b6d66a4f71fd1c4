"""`minidist plan`: what a training run will take, with the error of every answer.

    inputs   models, config.json, cluster.toml        runs       published runs, in published/
    answer   layouts, ties, what would change it      errors     error bars from held-back runs
    against  one's own layout beside the planner's
    cli      the command                              report     predicted beside published
    show     tables          charts   figures         calibrate  the fit of the constants
    trace    one real step of a large job, under a fake process group (needs torch)

>>> from minidist import plan
>>> plan.model_of("llama3-8b").num_layers
32
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
