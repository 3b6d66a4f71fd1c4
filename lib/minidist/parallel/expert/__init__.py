"""Expert parallelism: a mixture of experts whose experts are spread over ranks.

Read in this order:

- `router`    which experts a token visits, and with which weights
- `balance`   two ways to spread tokens evenly: an auxiliary loss, and a bias without a loss
- `dispatch`  capacity; tokens to their experts and back by all-to-all, with gradients
- `mesh`      expert parallelism beside data parallelism: who holds which experts
- `layer`     experts, shared experts, and the layer that replaces an MLP
- `gradients` which gradients are summed over which ranks
- `traffic`   a formula for the bytes of an all-to-all

Papers: GShard (arXiv 2006.16668), Switch Transformer (arXiv 2101.03961), DeepSeekMoE (arXiv
2401.06066), auxiliary-loss-free balancing (arXiv 2408.15664), DeepSeek-V3 (arXiv 2412.19437).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
