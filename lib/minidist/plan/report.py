"""Every published run: predicted, published, error. `python -m minidist.plan.report`.

The rows to which the model was not fitted come last. So the report ends with the verdict: the error
of every table, and the ten worst rows.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from minidist.plan.errors import error_bar
from minidist.plan.runs import Run, error_of, load_runs, memory_error_of, published_seconds


def label(run: Run) -> str:
    """Model and layout in a few words."""
    p, model = run.parallelism, run.model
    micro = run.micro_batch or "best"
    return (
        f"{model.num_parameters / 1e9:.3g}B s{model.context} dp{p.dp} tp{p.tp} pp{p.pp} "
        f"Z{p.zero_stage} v{run.chunks or 'best'} mb{micro} b{run.batch} {run.recompute}"
    )


def rows() -> list[dict]:
    """One record per published run."""
    records = []
    for run in load_runs():
        published_s, error = published_seconds(run), error_of(run)
        records.append(
            {
                "table": run.table,
                "split": run.split,
                "gpu": run.node.gpu.name,
                "gpus": run.parallelism.world_size,
                "software": run.software,
                "run": label(run),
                "predicted_s": published_s * (1 + error),
                "published_s": published_s,
                "error": error,
            }
        )
    return sorted(records, key=lambda record: (record["split"], record["table"]))


def summary(records: list[dict]) -> list[dict]:
    """Mean, median and largest absolute error of every table and split."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        groups[record["split"], record["table"]].append(record["error"])
    return [
        {
            "table": table,
            "split": split,
            "rows": len(errors),
            "mean": mean(abs(e) for e in errors),
            "median": median(abs(e) for e in errors),
            "bias": median(errors),
            "worst": max(errors, key=abs),
        }
        for (split, table), errors in sorted(groups.items())
    ]


def worst(records: list[dict], count: int = 10) -> list[dict]:
    """The test rows with the largest errors."""
    test = [record for record in records if record["split"] == "test"]
    return sorted(test, key=lambda record: -abs(record["error"]))[:count]


def _predicted(run: Run) -> float:
    return published_seconds(run) * (1 + error_of(run))


def sweeps(split: str = "test") -> list[dict]:
    """For each job of which several layouts were measured: the time of the layout that the model
    would choose, relative to the best measured layout; and whether the plan calls the two a tie.
    """
    jobs: dict[tuple, list[Run]] = defaultdict(list)
    for run in load_runs("vtrain_clusters", "vtrain_one_node", "megatron_2021"):
        if run.split == split and run.table != "megatron_table_1":
            key = (run.table, run.model, run.parallelism.world_size, run.batch)
            jobs[key].append(run)
    records = []
    for (table, model, gpus, batch), runs in jobs.items():
        if len(runs) < 2:
            continue
        chosen, best = min(runs, key=_predicted), min(runs, key=published_seconds)
        bars = [error_bar(run.model, run.node, run.parallelism) for run in (chosen, best)]
        limit = 1 + max(bar.relative for bar in bars)
        records.append(
            {
                "table": table,
                "job": f"{model.num_parameters / 1e9:.3g}B on {gpus} GPUs, batch {batch}",
                "layouts": len(runs),
                "chosen": label(chosen),
                "best": label(best),
                "costs_more": published_seconds(chosen) / published_seconds(best) - 1,
                "tie": _predicted(best) <= limit * _predicted(chosen),
            }
        )
    return records


def _print_rows(console: Console, title: str, records: list[dict]) -> None:
    console.print(f"\n{title}")
    for r in records:
        console.print(
            f"{r['split']:<11} {r['table']:<19} {r['gpu'][:8]:<8} {r['gpus']:>6} "
            f"{r['run']:<66} {r['predicted_s']:>9.4g} {r['published_s']:>9.4g} {r['error']:>+7.1%}",
            highlight=False,
            soft_wrap=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="minidist report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--short", action="store_true", help="the verdict only")
    options = parser.parse_args(arguments)
    records = rows()
    tables = summary(records)
    if options.json:
        whole = {"rows": records, "tables": tables, "worst": worst(records), "sweeps": sweeps()}
        print(json.dumps(whole, indent=1))
        return
    console = Console()
    if not options.short:
        title = (
            "split       table               GPU        GPUs run, predicted s, published s, error"
        )
        _print_rows(console, title, records)
    table = Table(box=None, pad_edge=False)
    for name in ("split", "table", "rows", "mean", "median", "bias", "worst"):
        table.add_column(name, justify="left" if name in ("split", "table") else "right")
    for line in tables:
        figures = (f"{line[name]:.1%}" for name in ("mean", "median", "bias", "worst"))
        table.add_row(line["split"], line["table"], str(line["rows"]), *figures)
    console.print()
    console.print(table)
    vtrain = [r["error"] for r in records if r["split"] == "test" and r["table"][:6] == "vtrain"]
    errors = [abs(e) for e in vtrain]
    console.print(f"vTrain together: mean {mean(errors):.1%}, median {median(errors):.1%}")
    memory = [abs(e) for run in load_runs() if (e := memory_error_of(run)) is not None]
    console.print(
        f"Memory of the fullest GPU, {len(memory)} published layouts: mean error {mean(memory):.1%}"
    )
    jobs = sweeps()
    costs = sorted((sweep["costs_more"] for sweep in jobs), reverse=True)
    console.print(
        f"Of {len(costs)} published sweeps the chosen layout is the best or within 3 % of it in "
        f"{sum(cost <= 0.03 for cost in costs)}; mean {mean(costs):.1%}, most {costs[0]:.1%}. "
        f"The best is among the layouts that are called ties in {sum(job['tie'] for job in jobs)}"
    )
    _print_rows(console, "The ten worst test rows", worst(records))


if __name__ == "__main__":
    main()
