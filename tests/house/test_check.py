"""`make check` runs the tests of what has changed."""

from __future__ import annotations

import check
import pytest


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("lib/minidist/parallel/zero/stage1.py", "tests/parallel/test_zero.py"),
        ("lib/minidist/kernel/front.py", "tests/kernel/test_kernel.py"),
        ("autograder/criteria/lab1_ddp/sampler.py", "tests/labs/test_lab1.py"),
        ("autograder/criteria/bonus_zero/flat.py", "tests/labs/test_bonus_zero.py"),
        ("tests/house/test_check.py", "tests/house/test_check.py"),
    ],
)
def test_a_change_runs_the_tests_of_its_package_or_lab(changed, test):
    assert test in check.tests_of([changed])


def test_a_change_of_one_lab_runs_no_tests_of_another():
    assert "tests/labs/test_lab2_accumulation.py" not in check.tests_of(
        ["autograder/criteria/lab1_ddp/sampler.py"]
    )
