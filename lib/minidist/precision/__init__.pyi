from .compare import ErrorRow, accumulation_error, matmul_error, update_survives
from .formats import FORMATS, Format, round_to, spacing, underflow_share
from .master import MasterWeights
from .scaler import GradScaler
from .training import MixedPrecisionPolicy, autocast_step

__all__ = [
    "FORMATS",
    "ErrorRow",
    "Format",
    "GradScaler",
    "MasterWeights",
    "MixedPrecisionPolicy",
    "accumulation_error",
    "autocast_step",
    "matmul_error",
    "round_to",
    "spacing",
    "underflow_share",
    "update_survives",
]
