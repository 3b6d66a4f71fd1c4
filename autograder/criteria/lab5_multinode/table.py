"""Lab 5: several nodes. 100 points on a CPU, with no second machine."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

files = Later("autograder.criteria.common.checkpoint_files")
checkpoint, death, goes_on, hierarchy, hook, links, lost, network, places, resume, script = later(
    "autograder.criteria.lab5_multinode",
    "checkpoint death goes_on hierarchy hook links lost network places resume script",
)

_PLACES = "Task 1, who is where"
_NETWORK = "Task 2, the right network card"
_CHECKPOINTS = "Task 3, checkpoints that survive"
_RESUME = "Task 4, everything that decides the next step"
_SCRIPT = "Task 5, a script for two nodes"
_LINK = "Task 6, how fast is the link?"
_HIERARCHY = "Task 7, spare the slow link"

_places = partial(Criterion, task=_PLACES, world="none")
_network = partial(Criterion, task=_NETWORK, world="none", observe=network.observe_interface)
_checkpoints = partial(Criterion, task=_CHECKPOINTS, world="none", deadline_s=40.0)
_resume = partial(Criterion, task=_RESUME, deadline_s=30.0)
_script = partial(Criterion, task=_SCRIPT, world="none")
_link = partial(Criterion, task=_LINK, world="none")
_hierarchy = partial(Criterion, task=_HIERARCHY, world="emulated", deadline_s=40.0)

LAB = Lab(
    name="lab5_multinode",
    title="Several nodes",
    practice_world_size=4,
    grading_world_size=6,
    gates=(Gate("resuming", ("node_resumes", "node_lost")),),
    withheld={
        **TRAINING_LOOP,
        "minidist.checkpoint.store": "checkpoints",
        "minidist.elastic": "resuming",
        "minidist.collectives.hierarchical": "the hierarchy",
        "minidist.collectives.ddp_hooks": "the hook",
    },
    criteria=(
        _places(
            name="node_places", title="node rank, local rank, global rank", points=5,
            draw=places.draw_places, observe=places.observe_places, judge=places.judge_places,
        ),
        _places(
            name="node_command", title="one torchrun command per node", points=7,
            draw=places.draw_command, observe=places.observe_command,
            judge=places.judge_command,
        ),
        _network(
            name="node_interface", title="the interface that leads to the other nodes", points=4,
            draw=network.draw_interface, judge=network.judge_interface,
        ),
        _network(
            name="node_nccl", title="NCCL's variable names one interface", points=2,
            draw=network.draw_nccl, judge=network.judge_nccl,
        ),
        _checkpoints(
            name="ckpt_roundtrip", title="what is loaded is what was saved", points=4,
            draw=checkpoint.draw_roundtrip, observe=checkpoint.observe_roundtrip,
            judge=checkpoint.judge_roundtrip,
        ),
        _checkpoints(
            name="ckpt_atomic", title="a death in the middle of a save does no harm", points=7,
            draw=files.draw_weights, observe=death.observe_atomic,
            judge=death.judge_atomic,
        ),
        _checkpoints(
            name="ckpt_durable", title="on the disk before it has its name", points=4,
            draw=files.draw_weights, observe=death.observe_durable,
            judge=death.judge_durable,
        ),
        _checkpoints(
            name="ckpt_damage", title="a damaged checkpoint is passed over", points=7,
            draw=files.draw_weights, observe=checkpoint.observe_damage,
            judge=checkpoint.judge_damage,
        ),
        _checkpoints(
            name="ckpt_keep", title="the last k are kept", points=4,
            draw=files.draw_weights, observe=checkpoint.observe_keep,
            judge=checkpoint.judge_keep,
        ),
        _resume(
            name="resume_training", title="model, optimizer and schedule go on", points=5,
            draw=resume.draw_training, observe=resume.observe_training,
            judge=resume.judge_training,
        ),
        _resume(
            name="resume_rng", title="every rank's random numbers go on", points=5,
            draw=resume.draw_rng, observe=resume.observe_rng, judge=resume.judge_rng,
        ),
        _resume(
            name="resume_sampler", title="step and sampler go on", points=4,
            draw=resume.draw_sampler, observe=resume.observe_sampler,
            judge=resume.judge_sampler,
        ),
        _script(
            name="node_script", title="train_node.py on two nodes", points=6,
            draw=script.draw, observe=script.observe_script, judge=script.judge_script,
            deadline_s=120.0,
        ),
        _script(
            name="node_resumes", title="goes on from a checkpoint", points=3,
            draw=script.draw, observe=goes_on.observe_goes_on, judge=goes_on.judge_goes_on,
            deadline_s=200.0,
        ),
        _script(
            name="node_lost", title="the same curve after a node was lost", points=5,
            draw=lost.draw_lost, observe=lost.observe_lost,
            judge=lost.judge_lost, deadline_s=220.0,
        ),
        _link(
            name="link_measure", title="latency and bandwidth of a link", points=5,
            draw=links.draw_measure, observe=links.observe_measure, judge=links.judge_measure,
        ),
        _link(
            name="link_bus", title="bus bandwidth of a collective", points=3,
            draw=links.draw_bus, observe=links.observe_bus, judge=links.judge_bus,
        ),
        _hierarchy(
            name="hier_values", title="the hierarchical all-reduce sums", points=6,
            draw=hierarchy.draw_values, observe=hierarchy.observe_values,
            judge=hierarchy.judge_values,
        ),
        _hierarchy(
            name="hier_slow_bytes", title="1/local_size over the slow link", points=7,
            draw=hierarchy.draw_slow, observe=hierarchy.observe_bytes,
            judge=hierarchy.judge_slow,
        ),
        _hierarchy(
            name="hier_local_bytes", title="no byte too many inside a node", points=3,
            draw=hierarchy.draw_bytes, observe=hierarchy.observe_bytes,
            judge=hierarchy.judge_local,
        ),
        Criterion(
            name="hier_hook", title="in torch's DDP, as a communication hook", task=_HIERARCHY,
            points=4, draw=hook.draw_hook, observe=hook.observe_hook,
            judge=hook.judge_hook,
        ),
    ),
)  # fmt: skip
