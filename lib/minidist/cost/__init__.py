"""Predict what training costs, in seconds, bytes and money, without any GPU. Pure Python.

    hardware     GPUs, links, nodes, with sources     transformer  parameters and FLOPs of a GPT
    comm         collectives: alpha, beta, gamma      bandwidth    bus bandwidth, fits
    nccl         NCCL's own tuning model              memory       bytes per GPU, ZeRO, activations
    training     days, GPU hours, money, MFU          pipeline     bubbles and utilisation
    parallelism  dp x pp x cp x tp, checked           step         predicted time of a step
    block        one block on one GPU                 exposed      traffic that is not hidden
    software     what an implementation hides         recommend    the fastest plan that fits
    scaling      Amdahl's law, bottlenecks

>>> import minidist.cost as cost
>>> plans = cost.recommend(model=cost.LLAMA2_7B, node=cost.DGX_A100, num_gpus=6, global_batch=48)
>>> plans[0].parallelism.world_size
6
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
