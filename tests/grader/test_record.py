"""A record and its JSON: the public form stays, and what is no record is refused with its place."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from course import LAB
from made_records import file_record, made_record, make_course

from autograder.criteria.criterion import Status, Verdict
from autograder.records.grading import read_history
from autograder.records.journal import Journal
from autograder.records.record import Record

FIELDS = """submission student lab world_size score max_score seconds sandboxed num_gpus criteria"""


def test_the_public_form():
    extra = Verdict("gpu", Status.PASS, 3, 3, "", (Status.PASS, Status.WRONG), extra=True)
    record = made_record("ada", {"setup": "WRONG"})
    record = replace(record, criteria=(*record.criteria, extra))
    json_ = record.to_json()
    assert list(json_) == FIELDS.split()
    assert (json_["score"], json_["max_score"]) == (98, 100)
    assert json_["criteria"][-1] == {
        "name": "gpu",
        "points": 3,
        "max_points": 3,
        "status": "PASS",
        "message": "",
        "ranks": [{"rank": 0, "status": "PASS"}, {"rank": 1, "status": "WRONG"}],
        "extra": True,
    }
    assert Record.from_json(json.loads(json.dumps(json_))) == record


def test_a_failure_of_the_grader_has_no_points():
    record = made_record("ada", {"*": "INFRA"})
    json_ = record.to_json()
    assert json_["score"] is None
    assert {c["points"] for c in json_["criteria"]} == {None}
    assert Record.from_json(json_) == record
    assert record.infra == record.criteria[0]


def test_an_older_record_and_a_newer_one():
    """Records without `num_gpus` are older than GPUs; unknown fields may be of a later version."""
    json_ = made_record("ada").to_json()
    del json_["num_gpus"]
    assert Record.from_json(json_ | {"mood": "good"}) == made_record("ada")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student": 3}, r"record.student: expected text, got 3"),
        ({"student": "a\0b"}, r"record.student: expected a name"),
        ({"lab": "../../etc"}, r"record.lab: expected a lab's name, got '../../etc'"),
        ({"world_size": True}, r"record.world_size: expected a whole number.*got True"),
        ({"world_size": 10**4000}, r"record.world_size: expected a whole number"),
        ({"seconds": math.nan}, r"record.seconds: expected a number from 0.*got nan"),
        ({"seconds": math.inf}, r"record.seconds: expected a number"),
        ({"seconds": -1}, r"record.seconds: expected a number"),
        ({"sandboxed": "yes"}, r"record.sandboxed: expected true or false, got 'yes'"),
        ({"score": 1e6}, r"record.score: its criteria add up to 100, got 1e\+06"),
        ({"score": None}, r"record.score: expected a number"),
        ({"max_score": 1}, r"record.max_score: its criteria add up to 100, got 1"),
        ({"criteria": {}}, r"record.criteria: expected a list, got \{\}"),
        ({"criteria": [[[]]]}, r"record.criteria\[0\]: expected an object"),
        ({"criteria": [{}]}, r"record.criteria\[0\].status: expected text, got nothing"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes, message):
    with pytest.raises(ValueError, match=message):
        Record.from_json(made_record("ada").to_json() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "GOOD"}, r"criteria\[1\].status: expected one of PASS, WRONG.*got 'GOOD'"),
        ({"points": "5"}, r"criteria\[1\].points: expected a number"),
        ({"points": None}, r"criteria\[1\].points: expected a number"),
        ({"name": "setup"}, r"record.criteria: expected different names"),
        ({"ranks": [{"rank": 7, "status": "PASS"}]}, r"criteria\[1\].ranks\[0\].rank: expected 0"),
        ({"ranks": ["PASS"]}, r"criteria\[1\].ranks\[0\]: expected an object, got 'PASS'"),
        ({"extra": 1}, r"criteria\[1\].extra: expected true or false"),
        ({"message": ["x"] * 10**6}, r"criteria\[1\].message: expected text, got \['x', 'x'"),
    ],
)
def test_what_is_wrong_with_a_verdict_is_said_with_its_place(changes, message):
    json_ = made_record("ada").to_json()
    json_["criteria"][1] |= changes
    with pytest.raises(ValueError, match=message) as error:
        Record.from_json(json_)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [None, 3, [], "x", {}, {"student": "ada"}])
def test_what_is_no_record_at_all(value):
    with pytest.raises(ValueError, match=r"record.*: expected .*, got"):
        Record.from_json(value)


def test_a_broken_record_in_the_journal_is_named_and_costs_no_other(tmp_path, capsys):
    course = make_course(tmp_path / "course")
    file_record(course, "ada")
    broken = made_record("kim").to_json() | {"seconds": "long"}
    journal = Journal(course.journal_path)
    journal.append({"kind": "submission", "key": "k", "record": broken})
    file_record(course, "lea")
    for _ in range(2):  # said once, although a command reads the journal several times
        assert [g.student for g in read_history(course)] == ["ada", "lea"]
    line = sum(1 for _ in course.journal_path.open()) - len(made_record("lea").criteria) - 1
    said = capsys.readouterr().err
    place = f"{course.journal_path}: line {line}: record.seconds: expected a number"
    assert said.count(place) == 1
    assert journal.finished("k") is None
    assert LAB in journal.all_finished().popitem()[1].lab
