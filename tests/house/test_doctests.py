"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import autograder
import minidist

MODULES = [
    module.name
    for package in (autograder, minidist)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
