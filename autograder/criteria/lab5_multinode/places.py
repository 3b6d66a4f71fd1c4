"""Criteria for task 1 of lab 5: the places of ranks on nodes, and the command of each node.

Torch's own parser of torchrun's arguments reads the commands. The parser runs in the judge, where
the student's code does not run.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from autograder.criteria.common.answers import item_of, naming, plain, unchanged
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank

# --- node_places ---------------------------------------------------------------------------------


@per_rank
def draw_places(rng: np.random.Generator) -> Values:
    """Three clusters per rank: nodes of equal size, nodes of unequal size, and a single node."""
    equal = [int(rng.integers(2, 6))] * int(rng.integers(2, 5))
    unequal = [int(n) for n in rng.permutation([1, 2, 3, int(rng.integers(4, 9))])]
    return {"clusters": [equal, unequal, [int(rng.integers(1, 9))]]}


def observe_places(functions: Any, inputs: Values, context: Context) -> Values:
    """The results of both functions for every rank of every cluster."""
    locate, global_rank = functions
    places: list[list[list[int]]] = []
    ranks: list[list[int]] = []
    for sizes in inputs["clusters"]:
        given = list(sizes)  # the same list for all calls, as in the lab
        places.append([])
        for rank in range(sum(sizes)):
            with naming(call := f"locate({rank}, {sizes})"):
                places[-1].append(_pair(locate(rank, given)))
            unchanged(call, "local_sizes", given, sizes)
        ranks.append([])
        for node, local in [(n, r) for n, size in enumerate(sizes) for r in range(size)]:
            with naming(call := f"global_rank({node}, {local}, {sizes})"):
                ranks[-1].append(integer(global_rank(node, local, given), "global_rank"))
            unchanged(call, "local_sizes", given, sizes)
    return {"places": places, "ranks": ranks}


def _pair(place: Any) -> list[int]:
    if not isinstance(place, tuple | list) or len(place) != 2:
        raise TypeError(f"locate: expected (node_rank, local_rank), got {place!r}")
    return [integer(place[0], "node_rank"), integer(place[1], "local_rank")]


def judge_places(case: Case) -> Iterator[Finding]:
    """Ranks count up node by node, and the two functions are inverse to each other."""
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, sizes in enumerate(case.inputs[rank]["clusters"]):
            right = [[node, local] for node, size in enumerate(sizes) for local in range(size)]
            what = f"nodes of {sizes} processes" if len(sizes) > 1 else f"one node of {sizes[0]}"
            problem = _first(item_of(answer.get("places"), number), right, "locate", sizes)
            problem = problem or _first(
                item_of(answer.get("ranks"), number), list(range(len(right))), "global_rank", sizes
            )
            if problem:
                yield Finding(f"{what}: {problem}", rank)
                break


def _first(got: Any, right: list[Any], what: str, sizes: list[int]) -> str:
    """A message about the first wrong entry of a list; "" if the list is right."""
    if got == right:
        return ""
    if not isinstance(got, list) or len(got) != len(right):
        return f"{what} gave no answer for every rank."
    at = next(i for i in range(len(right)) if got[i] != right[i])
    begins = [0, *accumulate(sizes)]
    node = max(n for n in range(len(sizes)) if begins[n] <= at)
    asked = f"rank {at}" if what == "locate" else f"node {node}, local rank {at - begins[node]}"
    return (
        f"{what} for {asked}: expected {_text(right[at])}, got {_text(got[at])}. Node {node} "
        f"holds ranks {begins[node]} to {begins[node + 1] - 1}: ranks count up node by node, and "
        "nodes need not be equally large."
    )


def _text(value: Any) -> str:
    return (
        f"({value[0]}, {value[1]})" if isinstance(value, list) and len(value) == 2 else str(value)
    )


# --- node_command --------------------------------------------------------------------------------


def draw_command(draw: Draw) -> list[Values]:
    """A job per rank: nodes, processes per node, rendezvous address, script; one never restarts."""
    first, *others = _draw_jobs(draw)
    return [first | {"max_restarts": 0}, *others]


@per_rank
def _draw_jobs(rng: np.random.Generator) -> Values:
    num_nodes = int(rng.integers(2, 5))
    a, b, c = (int(n) for n in rng.integers(1, 250, 3))
    rate = f"{rng.random():.3f}"
    return {
        "num_nodes": num_nodes,
        "local_size": num_nodes + int(rng.integers(1, 5)),
        "head": f"10.{a}.{b}.{c}",
        "port": int(rng.integers(20000, 60000)),
        "run_id": f"job-{int(rng.integers(10**6)):06d}",
        "max_restarts": int(rng.integers(1, 9)),
        # A word may contain a space, and may occur twice.
        "script": ["train.py", "--lr", rate, "--note", "from two nodes", "--decay", rate],
    }


def observe_command(node_command: Any, inputs: Values, context: Context) -> Values:
    """The command of every node."""
    job = {key: value for key, value in inputs.items() if key != "script"}
    commands, script = [], list(inputs["script"])
    for node in range(inputs["num_nodes"]):
        command = node_command(script, node_rank=node, **job)
        unchanged("node_command", "script", script, inputs["script"])
        if not isinstance(command, list | tuple) or not all(isinstance(c, str) for c in command):
            raise TypeError(f"node_command: expected a list of str, got {command!r}")
        commands.append(list(command))
    return {"commands": commands}


def judge_command(case: Case) -> Iterator[Finding]:
    """torchrun understands every node's command, and the commands together start the job.

    All of these pass: c10d or explicit node ranks, torchrun or python -m, --key=value or two words.
    """
    for rank, answer in enumerate(map(plain, case.answers)):
        job, commands = case.inputs[rank], answer.get("commands")
        if not isinstance(commands, list) or len(commands) != job["num_nodes"]:
            yield Finding("there is no command for every node.", rank)
            continue
        for node, command in enumerate(commands):
            try:
                problem = _problem(parse_torchrun(command), job, node)
            except ValueError as error:
                problem = str(error)
            if problem:
                yield Finding(
                    f"node {node} of {job['num_nodes']}, {job['local_size']} processes each: "
                    f"{problem}",
                    rank,
                )
                break


def parse_torchrun(command: Any) -> Namespace:
    """The arguments of a torchrun command as torch itself reads them.

    Raises:
        ValueError: the command does not call torchrun, or torchrun would refuse it or only print
            something and end.
    """
    from torch.distributed.run import get_args_parser

    words = [str(word) for word in command]
    if words[:1] == ["env"]:
        words = words[1:]
        while words and "=" in words[0]:
            words = words[1:]
    if words and words[0].rsplit("/", 1)[-1] == "torchrun":
        words = words[1:]
    elif words[1:3] == ["-m", "torch.distributed.run"]:
        words = words[3:]
    else:
        raise ValueError(
            f"the command must begin with torchrun (or python -m torch.distributed.run), "
            f"got {' '.join(words[:4])!r}."
        )

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"torchrun refuses it: {message}.")

    parser = get_args_parser()
    parser.error = refuse
    try:
        return parser.parse_args(words)
    except SystemExit:
        raise ValueError("it only makes torchrun print something and end.") from None


def _problem(args: Namespace, job: Values, node: int) -> str:
    """What is wrong with one node's command; "" if the command is right."""
    if args.standalone:
        return "--standalone makes this node a job of its own: it never looks for the others."
    sizes = {part for part in str(args.nnodes).split(":")}
    if sizes != {str(job["num_nodes"])}:
        return f"--nnodes is {args.nnodes}, expected {job['num_nodes']}, the number of nodes."
    if str(args.nproc_per_node) != str(job["local_size"]):
        return (
            f"--nproc-per-node is {args.nproc_per_node}, expected {job['local_size']}: the "
            "processes of this node, not of the whole job."
        )
    if str(args.max_restarts) != str(job["max_restarts"]):
        return f"--max-restarts is {args.max_restarts}, expected {job['max_restarts']}."
    if node and args.local_addr == job["head"]:
        return f"--local-addr is {args.local_addr}: that is node 0's address, not this node's."
    meeting = f"{job['head']}:{job['port']}"
    if args.rdzv_backend == "static":
        there = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        if str(args.node_rank) != str(node):
            return f"without a rendezvous backend --node-rank must be {node}, got {args.node_rank}."
    elif args.rdzv_backend == "c10d":
        there = args.rdzv_endpoint
        if args.rdzv_id != job["run_id"]:
            return (
                f"--rdzv-id is {args.rdzv_id}, expected {job['run_id']}: it keeps two jobs apart "
                "that meet at the same place."
            )
    else:
        return f"--rdzv-backend is {args.rdzv_backend}: use c10d, which needs no server of its own."
    if there != meeting:
        return (
            f"it looks for the others at {there or 'no place'}, expected {meeting}: every node "
            "goes to the same meeting point, on node 0."
        )
    if [args.training_script, *args.training_script_args] != job["script"]:
        return (
            f"it runs {[args.training_script, *args.training_script_args]}, expected "
            f"{job['script']}: torchrun's options first, then the script and its arguments as they "
            "are: a word with a blank stays one, and a word may come twice."
        )
    return ""
