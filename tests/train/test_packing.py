"""Several documents in one row: each is computed as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from minidist.launch import run
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.packing import document_mask, document_positions, documents_of, pack
from minidist.parallel.context import context_parallel_gpt, make_attention
from minidist.parallel.data import BucketedDDP
from minidist.parallel.pipeline import split_model
from minidist.parallel.recompute import recompute
from minidist.parallel.tensor import full_state_dict, parallelize_gpt
from minidist.parallel.zero import Zero3

CONFIG = GPTConfig(vocab_size=13, context=8, width=8, num_layers=2, num_heads=2)
DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12], [3, 3]]


def make() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def loss_alone(model: GPT, documents: list[list[int]]) -> torch.Tensor:
    """Mean over predicted tokens, each document in a forward of its own."""
    total, count = torch.zeros((), dtype=torch.double), 0
    for document in documents:
        if len(document) > 1:
            tokens = torch.tensor([document])
            total = total + lm_loss(model(tokens[:, :-1]), tokens[:, 1:]) * (len(document) - 1)
            count += len(document) - 1
    return total / count


def test_each_document_gets_the_logits_that_it_gets_alone() -> None:
    model, (tokens, _, ids) = make(), pack(DOCUMENTS, 8)
    assert tokens.shape == (2, 8)  # no more rows than needed
    logits = model(tokens, documents_BT=ids)
    rows = [[DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[3], DOCUMENTS[4]], [DOCUMENTS[2]]]
    for row, there in zip(rows, logits, strict=True):
        begin = 0
        for document in row:
            alone = model(torch.tensor([document]))[0]
            torch.testing.assert_close(there[begin : begin + len(document)], alone)
            begin += len(document)
    assert not torch.allclose(logits, model(tokens))  # without documents they see each other


def test_loss_and_gradients_are_those_of_the_documents() -> None:
    packed, alone = make(), make()
    tokens, targets, ids = pack(DOCUMENTS, 8)
    loss = lm_loss(packed(tokens, documents_BT=ids), targets)
    wanted = loss_alone(alone, DOCUMENTS)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for p, q in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_cumulated_lengths_and_ids_mean_the_same() -> None:
    ids = documents_of(torch.tensor([0, 3, 3, 5, 8], dtype=torch.int32))  # an empty one, too
    assert ids.tolist() == [[0, 0, 0, 2, 2, 3, 3, 3]]
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert document_mask(ids)[0, 0, 4].tolist() == [False] * 3 + [True] * 2 + [False] * 3
    for wrong in ([1, 2], [0, 3, 2], [0]):
        with pytest.raises(ValueError, match="rising numbers that begin with 0"):
            documents_of(torch.tensor(wrong))
    with pytest.raises(ValueError, match="number 1 has 9"):
        pack([[1], list(range(9))], 8)


def sharded() -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, model = make(), make()
    zero = Zero3(model, units=model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # As many predicted tokens on both ranks, so that the mean of means is the mean.
    own = [[[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]]]
    tokens, targets, ids = pack(own[rank], 8)
    lm_loss(model(tokens, documents_BT=ids), targets).backward()
    optimizer.step()
    loss_alone(alone, own[0] + own[1]).backward()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    got = zero.full_state_dict()
    refused = rf"on rank {rank} of 2 \(packed sequences .*; use minidist\.model\.GPT with"
    cp, cp_of_tp = context_parallel_gpt(make(), None), parallelize_gpt(make())
    cp_of_tp.blocks[0].attention.attend = make_attention(None)
    tokens, targets, ids = pack(own[0], 8)  # ranks of tensor parallelism read the same
    for call in (cp, cp.loss, cp_of_tp, cp_of_tp.loss, split_model(make(), 2)[0]):
        more = [targets] if "loss" in repr(call) and "bound" in repr(call) else []
        with pytest.raises(ValueError, match=refused):
            call(tokens, *more, documents_BT=ids)
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


def test_packed_rows_train_sharded_and_are_refused_where_they_would_be_ignored() -> None:
    assert max(run(sharded, 2)) < 1e-12


def split_by_tensor_parallelism(sequence_parallel: bool) -> float:
    dist.init_process_group("gloo")
    alone = make()
    tokens, targets, ids = pack(DOCUMENTS, 8)
    model = parallelize_gpt(make(), sequence_parallel=sequence_parallel)
    for block in model.blocks:
        recompute(block)
    with pytest.raises(ValueError, match="sequences of 9 tokens"):
        model(torch.zeros(2, 9, dtype=torch.int64))
    loss, wanted = model.loss(tokens, targets, documents_BT=ids), loss_alone(alone, DOCUMENTS)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    got = full_state_dict(model)
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_packed_rows_under_tensor_parallelism(sequence_parallel: bool) -> None:
    assert max(run(split_by_tensor_parallelism, 2, sequence_parallel)) < 1e-12


def replicated() -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, model = make(), make()
    for block in model.blocks:
        recompute(block)
    own = [[[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]]]
    tokens, targets, ids = pack(own[rank], 8)
    lm_loss(BucketedDDP(model)(tokens, documents_BT=ids), targets).backward()
    loss_alone(alone, own[0] + own[1]).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def test_packed_rows_under_data_parallelism_and_recomputation() -> None:
    assert max(run(replicated, 2)) < 1e-12


def test_a_number_that_comes_again_is_another_document() -> None:
    ids, as_packed = torch.tensor([[3, 3, 1, 3, 3]]), torch.tensor([[0, 0, 1, 2, 2]])
    assert torch.equal(document_positions(ids), document_positions(as_packed))
    assert torch.equal(document_mask(ids), document_mask(as_packed))


@pytest.mark.filterwarnings("error")
def test_documents_are_numbers_of_any_kind() -> None:
    plain = pack([[1, 2], [3]], 4)
    for documents in ([torch.tensor([1, 2]), torch.tensor([3])], [np.array([1, 2]), (3,)]):
        assert all(map(torch.equal, pack(documents, 4), plain))
    with pytest.raises(ValueError, match="document 1 has floats"):
        pack([[1], [0.5]], 4)  # type: ignore[list-item]
