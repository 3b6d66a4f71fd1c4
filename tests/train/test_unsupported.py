"""The page on what is not supported says what the code refuses, in the code's words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import minidist
from minidist.unsupported import Unsupported, every_refusal, page

LIBRARY = Path(minidist.__path__[0])


def declarations() -> dict[str, tuple[Path, ast.Call]]:
    """name -> where it is declared, of every refusal in the source."""
    found = {}
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and getattr(node.value.func, "id", "") == "Unsupported"
                and isinstance(node.targets[0], ast.Name)
            ):
                found[f"{path.stem}.{node.targets[0].id}"] = (path, node.value)
    return found


def test_the_page_has_a_line_per_refusal_of_the_source() -> None:
    declared = {
        tuple(ast.literal_eval(part) for part in (*call.args, call.keywords[0].value))
        for _, call in declarations().values()
    }
    told = {(each.where, each.what, each.instead) for each in every_refusal()}
    assert told >= declared
    assert len(declared) >= 15
    rows = [line for line in page().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(told)


def test_every_refusal_is_raised_by_a_module_that_declares_or_imports_it() -> None:
    texts = {path: path.read_text("utf-8") for path in LIBRARY.rglob("*.py")}
    for name, (path, _) in declarations().items():
        own = name.partition(".")[2]
        having = [text for text in texts.values() if re.search(rf"import .*\b{own}\b", text)]
        users = [texts[path], *having]
        assert any(f"{own}.error(" in text or f"{own}.instead" in text for text in users), name


def test_message_and_page_have_the_same_words() -> None:
    embedding = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    from minidist.replaced import LOST, check_layer

    with pytest.raises(ValueError, match="Split: ") as caught:
        check_layer("Split", embedding, nn.Linear)
    assert LOST.what in str(caught.value)
    assert str(caught.value).endswith(f"({LOST.what} are not supported); {LOST.instead}")
    assert f"| {LOST.where.replace('_', chr(92) + '_')} | {LOST.what} | {LOST.instead} |" in page()


def test_errors_have_the_kind_and_the_place_that_is_asked_for() -> None:
    refusal = Unsupported(
        "", "plurals", instead="use singulars"
    )  # without a place: not on the page
    error = refusal.error("got two", TypeError, where="count")
    assert type(error) is TypeError
    assert str(error) == "count: got two (plurals are not supported); use singulars"
    assert all(each.where for each in every_refusal())


def test_refusals_name_an_alternative_that_works() -> None:
    """The alternative for a length that a data set lacks, as one example of the page."""
    from minidist.sampler import DistributedSampler, make_loader

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(6))

    with pytest.raises(ValueError, match="; make_loader shares"):
        DistributedSampler(Stream(), rank=0, world_size=2)
    batches = [list(make_loader(Stream(), 1, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(int(x) for each in batches for batch in each for x in batch) == list(range(6))
