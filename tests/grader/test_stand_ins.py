"""Where an earlier task is wrong, a later check runs with ours, wherever theirs is called."""

import sys
import types

import pytest

from autograder.criteria import get_lab, lab_names, read_ours
from autograder.criteria.common.pretending import having
from autograder.inside.probe import _ours, _standing_in

NOTEBOOK = """
def double(x):
    return x + 1  # wrong


def twice(x, by=double):
    return by(by(x))


def quadruple(x):
    return double(double(x))


class Doubler:
    def __init__(self, by=double):
        self.by = by

    def run(self, x):
        return self.by(x) + double(x)


class Quadrupler(Doubler):
    def run(self, x):
        return 2 * super().run(x)
"""


@pytest.fixture
def notebook(monkeypatch):
    module = types.ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(NOTEBOOK, vars(module))
    return module


def right(x):
    return 2 * x


def test_a_function_a_default_and_a_method_call_ours(notebook):
    with _standing_in(notebook.quadruple, {"double": right}) as subject:
        assert subject(5) == 20
        assert notebook.twice(5) == 20
        assert notebook.Doubler().run(5) == 20
    assert notebook.quadruple(5) == notebook.twice(5) == 7
    assert notebook.Doubler().run(5) == 12


def test_what_the_notebook_assigns_meanwhile_stays(notebook):
    """Its threads find every name at any moment: the namespace is never emptied."""
    names = Emptied(vars(notebook))
    with having(names, {"double": right, "new": 1}):
        names["times"] = names["double"](2)
    assert names["times"] == 4
    assert names["double"](2) == 3
    assert "new" not in names


class Emptied(dict):
    def clear(self):
        raise AssertionError("a thread of the student's would find no name now")


def test_in_a_tuple_ours_has_the_place_of_theirs(notebook):
    with _standing_in((notebook.Doubler, notebook.double), {"double": right}) as subject:
        assert subject[0] is notebook.Doubler
        assert subject[1] is right
        assert subject[0]().run(5) == 20


def test_a_subclass_inherits_from_ours(notebook):
    class Ours:
        def run(self, x):
            return 2 * x

    with _standing_in(notebook.Quadrupler, {"Doubler": Ours}) as subject:
        assert subject().run(5) == 20
    assert notebook.Quadrupler.__bases__ == (notebook.Doubler,)


def test_ours_comes_as_text_and_only_when_the_referee_sends_it():
    for lab in map(get_lab, lab_names()):
        names = tuple({name for criterion in lab.criteria for name in criterion.stand_ins})
        if names:
            assert set(_ours(names, read_ours(lab.name))) == set(names)
        assert _ours(names, "") == {}


def test_without_stand_ins_nothing_changes(notebook):
    with _standing_in(notebook.quadruple, {}) as subject:
        assert subject is notebook.quadruple
        assert subject(5) == 7
