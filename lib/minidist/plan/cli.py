"""The command `minidist`: plan, explain, compare, report, trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import argcomplete
from rich.console import Console

from minidist.cost.memory import state_bytes
from minidist.cost.recommend import NothingFitsError
from minidist.cost.search import TrainingJob
from minidist.cost.software import SOFTWARE
from minidist.cost.step import STEP_SCHEDULES
from minidist.plan.against import challenge
from minidist.plan.answer import RESERVE, Option, as_dict, options_of, plan, priced
from minidist.plan.inputs import (
    CLUSTERS,
    MODELS,
    InputError,
    amount,
    batch_of,
    cluster_of,
    constraint_of,
    layout_of,
    model_of,
)
from minidist.plan.show import show_answer, show_comparison, show_parts, show_trace

_LONGEST = 8192  # planned context, if the model's is longer and --seq is not given
_CLUSTER_HELP = """\
cluster.toml, all but gpu optional (bandwidths are of one direction and of one GPU):
  gpu = "h100"              # one of {gpus}
  gpus_per_node = 8
  memory_gb = 80
  power_w = 500             # a power limit below the chip's own slows products down
  intra_node_gb_per_s = 450
  network_gbit_per_s = 400
  price = 2.5               # dollars per GPU hour

Every step time has an error bar: four of five held-back published runs of its kind are closer.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minidist", description="What a training run will take, from published measurements."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument(
        "--model", required=True, help=f"config.json of Hugging Face, or {', '.join(MODELS)}"
    )
    job.add_argument("--gpus", required=True, help="how many")
    job.add_argument("--gpu", help=f"which (h100): {', '.join(CLUSTERS)}")
    job.add_argument("--cluster", metavar="FILE", help="cluster.toml, see below")
    job.add_argument("--batch-tokens", required=True, metavar="N", help="per step, such as 4M")
    job.add_argument("--seq", help="tokens per sequence, if not the model's context")
    job.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    job.add_argument(
        "--gradients",
        choices=("fp32", "bf16"),
        default="fp32",
        help="fp32: 18 bytes per parameter, 6 + 12/d with ZeRO-1; bf16: 16 bytes",
    )
    job.add_argument("--software", choices=tuple(SOFTWARE), help="if not what is usual today")
    job.add_argument(
        "--schedule", choices=STEP_SCHEDULES, default="1f1b", help="of the pipeline (1f1b)"
    )
    job.add_argument("--offload", action="store_true", help="the optimiser's states on the host")
    job.add_argument("--unfused-attention", action="store_true", help="without FlashAttention")
    job.add_argument("--max-cp", help="largest context-parallel degree (16 from 32k tokens on)")
    job.add_argument("--tokens", help="of the whole training, such as 15T: days and GPU hours")
    job.add_argument("--price", help="dollars per GPU hour, with --tokens")
    job.add_argument("--json", action="store_true")
    job.add_argument("--plot", metavar="FILE", help="memory, step time and scaling as a figure")
    shared = {
        "parents": [job],
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "epilog": _CLUSTER_HELP.format(gpus=", ".join(CLUSTERS)),
    }
    planning = commands.add_parser("plan", help="the fastest layouts that fit", **shared)
    planning.add_argument("--constraint", action="append", default=[], help="such as 'tp<=8,pp<=4'")
    planning.add_argument("--top", type=int, default=5, help="how many layouts (5)")
    words = "such as 'dp=8 pp=4 tp=8 zero=1 chunks=2 micro=1 recompute=full'"
    explaining = commands.add_parser("explain", help="every second and byte of a layout", **shared)
    explaining.add_argument("--layout", required=True, help=words)
    comparing = commands.add_parser("compare", help="layouts side by side", **shared)
    comparing.add_argument("--layout", required=True, action="append", help=words)
    reporting = commands.add_parser("report", help="predicted and published, of every known run")
    reporting.add_argument("--json", action="store_true")
    reporting.add_argument("--short", action="store_true")
    tracing = commands.add_parser(
        "trace", help="one real step of rank 0 of a large job, under a fake process group"
    )
    tracing.add_argument("--model", default="gpt3-175b", help="a GPT; its sizes can be changed:")
    for name in ("layers", "width", "heads", "seq"):
        tracing.add_argument(f"--{name}", help="if not the model's")
    tracing.add_argument("--dp", default="128", help="ranks of FSDP (128)")
    tracing.add_argument("--tp", default="8", help="ranks of tensor parallelism (8)")
    tracing.add_argument("--micro", default="1", help="sequences (1)")
    tracing.add_argument("--json", action="store_true")
    return parser


def _trace(options: argparse.Namespace) -> int:
    """1 if the counts or bytes of the step are not those that the sizes say."""
    fields = {"layers": "num_layers", "width": "width", "heads": "num_heads", "seq": "context"}
    changes = {
        field: _whole(getattr(options, name), f"--{name}")
        for name, field in fields.items()
        if getattr(options, name)
    }
    model = dataclasses.replace(model_of(options.model), **changes)
    degrees = {name: _whole(getattr(options, name), f"--{name}") for name in ("dp", "tp")}
    micro_batch = _whole(options.micro, "--micro")
    from minidist.plan.trace import expected, trace

    found = trace(model, **degrees, micro_batch=micro_batch)
    sizes = expected(model, **degrees, micro_batch=micro_batch)
    agree = found.calls == sizes.calls and found.num_bytes == sizes.num_bytes
    if options.json:
        record = {"trace": dataclasses.asdict(found), "expected": dataclasses.asdict(sizes)}
        print(json.dumps(record | {"agree": agree}, indent=1))
        return 0 if agree else 1
    show_trace(Console(), found, sizes, ranks=degrees["dp"] * degrees["tp"])
    return 0 if agree else 1


def _whole(text: str, what: str) -> int:
    value = amount(text, what)
    if value != int(value):
        raise InputError(f"{what}: expected a whole number, got {text!r}")
    return int(value)


def _job(options: argparse.Namespace) -> tuple[TrainingJob, float | None, list[str]]:
    """The job, the price per GPU hour, and what was assumed."""
    notes = []
    model = model_of(options.model)
    if options.seq:
        model = dataclasses.replace(model, context=_whole(options.seq, "--seq"))
    elif model.context > _LONGEST:
        notes.append(
            f"sequences of {_LONGEST:,} of the model's {model.context:,}; --seq changes it"
        )
        model = dataclasses.replace(model, context=_LONGEST)
    if model.num_experts:
        notes.append("experts get equally many tokens; with uneven routing steps take longer")
    node, price = cluster_of(options.gpu, options.cluster)
    if options.price:
        price = amount(options.price, "--price")
    if options.precision not in node.gpu.peak_flops_per_s:
        known = ", ".join(sorted(node.gpu.peak_flops_per_s))
        raise InputError(f"--precision: {node.gpu.name} has no {options.precision}, only {known}")
    max_cp = _whole(options.max_cp, "--max-cp") if options.max_cp else 0
    constraints = [constraint_of(text) for text in getattr(options, "constraint", [])]
    precision = "bf16_fp32_grads" if options.gradients == "fp32" else "bf16_mixed"
    job = TrainingJob(
        model=model,
        node=node,
        num_gpus=_whole(options.gpus, "--gpus"),
        global_batch=batch_of(options.batch_tokens, model.context),
        states=state_bytes(precision=precision),
        fused_attention=not options.unfused_attention,
        max_cp=max_cp or (16 if model.context >= 32768 else 1),
        reserve=RESERVE,
        dtype=options.precision,
        software=SOFTWARE[options.software] if options.software else None,
        offload=options.offload,
        schedule=options.schedule,
        even_stages=False,
        allowed=(lambda p: all(test(p) for test in constraints)) if constraints else None,
    )
    return job, price, notes


def _run(options: argparse.Namespace) -> None:
    job, price, notes = _job(options)
    tokens = amount(options.tokens, "--tokens") if options.tokens else None
    console = Console()
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    changes: list[dict] = []
    told: tuple[str, ...] = ()
    shown: tuple[Option, ...]
    if options.command == "plan":
        answer = plan(job, top=max(1, options.top))
        job, shown, told = answer.job, answer.options, answer.notes
        changes = [dataclasses.asdict(change) for change in answer.changes]
        if not options.json:
            show_answer(console, answer, tokens=tokens, price=price)
    else:
        texts = [options.layout] if isinstance(options.layout, str) else options.layout
        shown = options_of(job, [priced(job, layout_of(text)) for text in texts])
        if options.command == "explain":
            verdict = f"Beside the planner's, this layout {challenge(job, texts[0]).verdict}."
            told = (verdict,)
            if not options.json:
                show_parts(console, job, shown[0])
                console.print(verdict, soft_wrap=True)
        elif not options.json:
            show_comparison(console, job, shown, tokens=tokens, price=price)
    if options.json:
        record = {
            "parameters": job.model.num_parameters,
            "active_parameters": job.model.active_parameters,
            "gpus": job.num_gpus,
            "gpu": job.node.gpu.name,
            "batch_sequences": job.global_batch,
            "batch_tokens": job.global_batch * job.model.context,
            "notes": [*notes, *told],
            "layouts": [as_dict(o, job, tokens=tokens, price=price) for o in shown],
            "would_change": changes,
        }
        print(json.dumps(record, indent=1))
    if options.plot:
        from minidist.plan.charts import save

        save(job, shown, options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for input that is wrong, 1 if nothing fits."""
    parser = _parser()
    argcomplete.autocomplete(parser)  # acts only if the shell asks for completions
    options = parser.parse_args(arguments)
    if options.command == "report":
        from minidist.plan.report import main as report

        report([f"--{name}" for name in ("json", "short") if getattr(options, name)])
        return 0
    try:
        if options.command == "trace":
            return _trace(options)
        _run(options)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
        return 0
    except NothingFitsError as error:
        print(f"minidist {options.command}: {error}", file=sys.stderr)
        return 1
    except (InputError, OSError, ValueError) as error:
        print(f"minidist {options.command}: {error}", file=sys.stderr)
        return 2
    return 0
