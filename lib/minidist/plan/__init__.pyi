from .against import Challenge, challenge
from .answer import Answer, Change, Option, options_of, plan, priced
from .errors import ErrorBar, error_bar
from .inputs import (
    CLUSTERS,
    InputError,
    Layout,
    amount,
    cluster_of,
    constraint_of,
    from_hugging_face,
    layout_of,
    model_of,
)
from .models import MODELS
from .runs import Run, error_of, load_runs, predict_run

__all__ = [
    "CLUSTERS",
    "MODELS",
    "Answer",
    "Challenge",
    "Change",
    "ErrorBar",
    "InputError",
    "Layout",
    "Option",
    "Run",
    "amount",
    "challenge",
    "cluster_of",
    "constraint_of",
    "error_bar",
    "error_of",
    "from_hugging_face",
    "layout_of",
    "load_runs",
    "model_of",
    "options_of",
    "plan",
    "predict_run",
    "priced",
]
