from .compressor import Compressor, Segment, Traffic, segments_of
from .hook import HookState, compression_hook, sum_in_place
from .native import register_torch_hook, torch_hook
from .powersgd import PowerSGD, orthonormalise
from .quantize import Cast, Int8
from .topk import TopK

__all__ = [
    "Cast",
    "Compressor",
    "HookState",
    "Int8",
    "PowerSGD",
    "Segment",
    "TopK",
    "Traffic",
    "compression_hook",
    "orthonormalise",
    "register_torch_hook",
    "segments_of",
    "sum_in_place",
    "torch_hook",
]
