from .compare import ErrorRow, accumulation_error, matmul_error, update_survives
from .formats import FORMATS, Format, round_to, spacing, underflow_share
from .fp8 import (
    FP8_RECIPES,
    BlockScaling,
    DelayedScale,
    Fp8Linear,
    Fp8Recipe,
    Scaled,
    fp8_product,
    quantize,
    use_fp8,
)
from .master import MasterWeights
from .scaler import GradScaler
from .training import MixedPrecisionPolicy, autocast_step

__all__ = [
    "FORMATS",
    "FP8_RECIPES",
    "BlockScaling",
    "DelayedScale",
    "ErrorRow",
    "Format",
    "Fp8Linear",
    "Fp8Recipe",
    "GradScaler",
    "MasterWeights",
    "MixedPrecisionPolicy",
    "Scaled",
    "accumulation_error",
    "autocast_step",
    "fp8_product",
    "matmul_error",
    "quantize",
    "round_to",
    "spacing",
    "underflow_share",
    "update_survives",
    "use_fp8",
]
