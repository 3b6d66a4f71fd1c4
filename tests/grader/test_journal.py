"""The journal: nothing lost, nothing doubled, nothing joined, whatever is killed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
from made_records import made_record

from autograder.records.journal import Journal
from autograder.records.version import submission_key

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "build" / "journal.jsonl")


def _write_many(path: Path, writer: int, count: int) -> None:
    journal = Journal(path)
    for number in range(count):
        journal.append({"writer": writer, "number": number, "text": "é\n" * (number % 50)})


def test_what_goes_in_comes_out(journal: Journal):
    assert list(journal.iter_entries()) == []
    assert journal.finished("k") is None
    records = [{"a": 1, "text": "line\nbreak \x1b \ud800"}, {"b": [1.5, None, True]}]
    for record in records:
        journal.append(record)
    assert list(journal.iter_entries()) == records
    assert journal.problems == []
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600
    assert journal.path.read_bytes().count(b"\n") == 2
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"x": float("nan")})
    assert len(list(journal.iter_entries())) == 2


def test_finished_is_the_last_complete_verdict(journal: Journal):
    journal.append({"kind": "verdict", "key": "k", "criterion": "setup"})
    assert journal.finished("k") is None
    for seconds in (1.0, 2.0):
        journal.append_record("k", made_record("ada", seconds=seconds))
    journal.append_record("other", made_record("k"))
    journal.append({"kind": "verdict", "key": "k", "criterion": "ddp"})
    assert journal.finished("k") == made_record("ada", seconds=2.0)
    assert journal.finished("other") == made_record("k")
    assert journal.finished("none") is None
    assert journal.all_finished() == {k: journal.finished(k) for k in ("k", "other")}


def test_a_torn_line_is_reported_and_stays_alone(journal: Journal):
    for number in range(3):
        journal.append_record(f"k{number}", made_record("ada", seconds=number))
    whole = journal.path.read_bytes()
    again = made_record("ada", seconds=9.0)
    start_of_last = whole.rindex(b"\n", 0, -1) + 1
    for size in (*range(start_of_last + 1, len(whole), 37), len(whole) - 1):
        journal.path.write_bytes(whole[:size])
        assert [r["key"] for r in journal.iter_entries()] == ["k0", "k1"]
        assert len(journal.problems) == 1
        assert "line 3: not finished" in journal.problems[0]
        assert journal.finished("k2") is None
        journal.append_record("k2", again)
        assert journal.finished("k2") == again
        complete = size == len(whole) - 1  # only the line's end was lost: then nothing was
        assert [r["key"] for r in journal.iter_entries()] == ["k0", "k1"] + ["k2"] * (1 + complete)
        assert len(journal.problems) == (0 if complete else 1)


def test_garbage_is_skipped(journal: Journal):
    journal.append({"n": 1})
    with journal.path.open("ab") as file:
        file.write(b'\xff\x00\n[1]\n{"n": 2}\n' + b"[" * 100_000 + b"\n")
    assert list(journal.iter_entries()) == [{"n": 1}, {"n": 2}]
    assert [p.split(": ")[1] for p in journal.problems] == ["line 2", "line 3", "line 5"]


def test_several_processes_write(journal: Journal):
    processes = [
        FORK.Process(target=_write_many, args=(journal.path, writer, 200)) for writer in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    records = list(journal.iter_entries())
    assert journal.problems == []
    assert len(records) == 800
    for writer in range(4):
        assert [r["number"] for r in records if r["writer"] == writer] == list(range(200))


def test_kill_9_loses_at_most_the_line_in_hand(journal: Journal):
    for round_ in range(5):
        before = sum(1 for _ in journal.iter_entries())
        process = FORK.Process(target=_write_many, args=(journal.path, round_, 1_000_000))
        process.start()
        deadline = time.monotonic() + 60
        while sum(1 for _ in journal.iter_entries()) < before + 10:
            assert time.monotonic() < deadline
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        journal.append({"writer": round_, "number": "after"})  # the lock is free again
        mine = [r["number"] for r in journal.iter_entries() if r["writer"] == round_]
        assert mine == [*range(len(mine) - 1), "after"]
        assert len(mine) > 10


def test_a_full_disk_leaves_the_journal_as_it_was(journal: Journal, monkeypatch):
    journal.append({"n": 1})
    before = journal.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="only a part"):
        journal.append({"n": 2})
    assert journal.path.read_bytes() == before

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        journal.append({"n": 2})
    assert journal.path.read_bytes() == before


def test_a_link_is_not_followed(journal: Journal, tmp_path: Path):
    journal.path.parent.mkdir()
    journal.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        journal.append({"n": 1})
    assert not (tmp_path / "elsewhere").exists()


def test_keys_differ_in_every_part():
    one = submission_key("a" * 64, "lab1_ddp", 3, "v1")
    assert one == submission_key("a" * 64, "lab1_ddp", 3, "v1")
    others = {
        submission_key("b" * 64, "lab1_ddp", 3, "v1"),
        submission_key("a" * 64, "lab1_ddp2", 3, "v1"),
        submission_key("a" * 64, "lab1_ddp", 2, "v1"),
        submission_key("a" * 64, "lab1_ddp", 3, "v2"),
    }
    assert len(others | {one}) == 5
    assert one.isalnum()
    json.dumps(one)
