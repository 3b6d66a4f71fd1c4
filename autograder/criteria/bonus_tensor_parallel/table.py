"""Bonus: a tensor-parallel transformer layer. 100 points on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Lab
from autograder.criteria.later import Later, later

layers, linear, operators, paper, random, traffic, vocab = later(
    "autograder.criteria.bonus_tensor_parallel",
    "layers linear operators paper random traffic vocab",
)
mark_steps = Later("autograder.criteria.common.emulated.mark_steps")

# Functions of earlier tasks that later tasks may call, and the criteria that judge them.
_OPERATORS = ("copy_in", "sum_out")
_SLICES = (*_OPERATORS, "my_slice", "parameter")
_LAYERS = (*_SLICES, "ColumnParallelLinear", "RowParallelLinear")
_HALVES = (*_LAYERS, "ParallelMLP", "ParallelAttention")
_judges_operators = ("btp_f", "btp_g")
_judges_slices = (*_judges_operators, "btp_slices")
_judges_layers = (*_judges_slices, "btp_column", "btp_gather", "btp_row", "btp_scatter")
_judges_halves = (
    *(*_judges_layers, "btp_mlp", "btp_mlp_traffic"),
    *("btp_heads", "btp_attention", "btp_attention_traffic"),
)
_after_f_and_g: dict[str, Any] = {"stand_ins": _OPERATORS, "relies_on": _judges_operators}
_after_slices: dict[str, Any] = {"stand_ins": _SLICES, "relies_on": _judges_slices}
_after_layers: dict[str, Any] = {"stand_ins": _LAYERS, "relies_on": _judges_layers}
_after_halves: dict[str, Any] = {"stand_ins": _HALVES, "relies_on": _judges_halves}
_after_operators: dict[str, Any] = {
    "stand_ins": (*_HALVES, "ParallelBlock", "gather_in", "scatter_out"),
    "relies_on": (*_judges_halves, "btp_block", "btp_sequence_operators"),
}
_after_embedding: dict[str, Any] = {
    "stand_ins": (*_SLICES, "owned"),
    "relies_on": (*_judges_slices, "btp_embedding"),
}

_operator = partial(
    Criterion, task="Task 1, f and g", draw=operators.draw, observe=operators.observe
)
_linear = partial(Criterion, task="Task 2, two linear layers", draw=linear.draw)
_traffic = partial(Criterion, draw=traffic.draw, plan=mark_steps, world="emulated", deadline_s=40.0)
_mlp = "Task 3, the MLP"
_attention = partial(Criterion, task="Task 4, attention", draw=layers.draw_biased, **_after_layers)
_random = partial(Criterion, task="Task 5, dropout", draw=random.draw)
_block = partial(Criterion, task="Task 6, the layer")
_vocab = partial(Criterion, task="Task 7, the vocabulary")
_sequence = "Task 8, sequence parallelism"

LAB = Lab(
    name="bonus_tensor_parallel",
    title="A tensor-parallel transformer layer",
    practice_world_size=2,
    grading_world_size=4,
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.tensor": "every task",
    },
    criteria=(
        _operator(name="btp_f", title="f: identity forward, all-reduce backward", points=4,
                  judge=operators.judge_f),
        _operator(name="btp_g", title="g: all-reduce forward, identity backward", points=4,
                  judge=operators.judge_g),
        _linear(name="btp_slices", title="each rank holds its slice, and no more", points=5,
                observe=linear.observe_slices, judge=linear.judge_slices),
        _linear(name="btp_column", title="column-parallel, forward and backward", points=6,
                observe=linear.observe_column, judge=linear.judge_column, **_after_f_and_g),
        _linear(name="btp_gather", title="column-parallel with its output gathered", points=4,
                observe=linear.observe_gather, judge=linear.judge_gather, **_after_f_and_g),
        _linear(name="btp_row", title="row-parallel, the bias once", points=6,
                observe=linear.observe_row, judge=linear.judge_row, **_after_f_and_g),
        _linear(name="btp_scatter", title="row-parallel from a whole input", points=3,
                draw=linear.draw_scatter,
                observe=linear.observe_scatter, judge=linear.judge_scatter, **_after_slices),
        Criterion(name="btp_mlp", title="the MLP: output and weights' gradients", points=5,
                  task=_mlp, draw=layers.draw_biased, observe=layers.observe_mlp,
                  judge=layers.judge_mlp, **_after_layers),
        _traffic(name="btp_mlp_traffic", title="the MLP: its input's gradient, and what it sends",
                 points=5, task=_mlp, observe=traffic.observe_mlp, judge=traffic.judge_mlp,
                 **_after_layers),
        _attention(name="btp_heads", title="own heads' queries, keys and values", points=4,
                   observe=layers.observe_heads, judge=layers.judge_heads),
        _attention(name="btp_attention", title="attention: output and weights' gradients",
                   points=5, draw=layers.draw_attention, observe=layers.observe_attention,
                   judge=layers.judge_attention),
        _traffic(name="btp_attention_traffic", points=4, task="Task 4, attention",
                 title="attention: its input's gradient, and what it sends",
                 observe=traffic.observe_attention, judge=traffic.judge_attention,
                 **_after_layers),
        _random(name="btp_masks_inside", title="other masks where ranks hold other features",
                points=3, observe=random.observe_inside, judge=random.judge_inside),
        _random(name="btp_masks_outside", title="the same masks where ranks hold the same",
                points=3, observe=random.observe_outside, judge=random.judge_outside),
        _block(name="btp_block", title="the layer, as one process computes it", points=4,
               draw=layers.draw_whole, observe=layers.observe_block, judge=layers.judge_block,
               **_after_halves),
        _block(name="btp_block_dropout", title="the layer with dropout", points=3,
               draw=random.draw_block_case, observe=random.observe_block,
               judge=random.judge_block,
               stand_ins=(*_HALVES, "RankStream"),
               relies_on=(*_judges_halves, "btp_masks_inside", "btp_masks_outside")),
        _vocab(name="btp_embedding", title="the embedding", points=4, draw=vocab.draw_embedding,
               observe=vocab.observe_embedding, judge=vocab.judge_embedding, **_after_slices),
        _vocab(name="btp_loss", title="the loss, from parts of the logits", points=4,
               draw=vocab.draw_loss, observe=vocab.observe_cut, judge=vocab.judge_loss,
               **_after_embedding),
        _vocab(name="btp_loss_gradient", title="the gradient of the logits", points=3,
               draw=vocab.draw_loss, observe=vocab.observe_gradient, judge=vocab.judge_gradient,
               **_after_embedding),
        _vocab(name="btp_loss_stable", title="logits of any size", points=2,
               draw=vocab.draw_stable, observe=vocab.observe_stable, judge=vocab.judge_stable,
               **_after_embedding),
        _traffic(name="btp_loss_traffic", title="no logits travel", points=2,
                 task="Task 7, the vocabulary", draw=vocab.draw_traffic,
                 observe=vocab.observe_traffic, judge=vocab.judge_traffic, **_after_embedding),
        Criterion(name="btp_sequence_operators", points=4, task=_sequence,
                  title="all-gather and reduce-scatter, each the other's backward",
                  draw=operators.draw_sequence, observe=operators.observe_sequence,
                  judge=operators.judge_sequence),
        Criterion(name="btp_sequence", title="the layer on a part of the tokens", points=4,
                  task=_sequence, draw=layers.draw, observe=layers.observe_sequence,
                  judge=layers.judge_sequence, **_after_operators),
        Criterion(name="btp_sequence_norms", points=3, task=_sequence,
                  title="gradients of what is replicated", draw=layers.draw,
                  observe=layers.observe_norms, judge=layers.judge_norms, **_after_operators),
        _traffic(name="btp_sequence_traffic", points=3, task=_sequence,
                 title="no all-reduce of activations", observe=traffic.observe_sequence,
                 judge=traffic.judge_sequence, **_after_operators),
        Criterion(name="btp_paper", title="bytes, on paper", points=3,
                  task="Task 9, the price", world="none", draw=paper.draw,
                  observe=paper.observe, judge=paper.judge),
    ),
)  # fmt: skip
