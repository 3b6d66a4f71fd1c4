"""`autograder collect`: every learning platform's download, whole, or nothing and why not."""

from __future__ import annotations

import csv
import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
from course import LAB
from made_records import keep, made_record, make_course, take_in

from autograder.__main__ import main
from autograder.gradebook import unpack
from autograder.gradebook.collect import collect
from autograder.gradebook.database import handed_in_at
from autograder.gradebook.roster import read_roster
from autograder.gradebook.unpack import DownloadError
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission, find_submissions

CALENDAR = f"""[calendar]
timezone = "America/New_York"
[calendar.{LAB}]
due = 2026-11-05
late_per_day = 10
late_grace_minutes = 15
"""
ROSTER = """student_id,first_name,last_name,email,canvas_id,github_username,group_name
ada,Ada,Lovelace,ada@x.org,101,lady-ada,
kim,Kim,Ng,kim@x.org,102,kng,Team Blue
zoe,Zoë,Da Silva-Müller,zoe@x.org,103,zds,Team Blue
ned,Ned,Nobody,ned@x.org,104,ned,
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    course = make_course(tmp_path_factory.mktemp("course"))
    (course.root / "course.toml").write_text(CALENDAR)
    return course


@pytest.fixture
def course(made, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(made.root))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roster.csv").write_text(ROSTER)
    return made


def notebook(mark, lab=LAB):
    cell = {"cell_type": "code", "source": f"# {mark}", "outputs": [], "execution_count": None}
    cell["metadata"] = {"nbgrader": {"grade_id": "setup" if lab == LAB else "x"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def zipped(folder, path=None):
    path = path or folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return path


def marks(into):
    """Student -> what of theirs was taken, and its time."""
    return {
        each.student: (
            json.loads(each.path.read_text())["cells"][0]["source"][2:],
            handed_in_at(each.path),
        )
        for each in find_submissions([into], LAB).submissions
    }


def run(course, download, *more, into="got", code=0):
    arguments = ["collect", str(download), "--lab", LAB, "--roster", "roster.csv"]
    assert main([*arguments, "--into", into, *more]) == code
    return Path(into)


METADATA = """---
submission_7:
  :submitters:
  - :name: Ada Lovelace
    :sid: '991'
    :email: ADA@x.org
  :created_at: 2026-11-05 23:05:00.123456000 Z
  :score: 0.0
submission_8:
  :submitters:
  - :name: Kim Ng
    :email: kim@x.org
  - :name: Zoe da Silva-Muller
    :email: zoe@x.org
  :created_at: 2026-11-06 18:00:00 -05:00
"""
LATE = "2026-11-06 05:15:01 UTC"  # the end of the day in New York, the grace and a second
CANVAS = {
    "lovelaceada_101_9001_lab1_ddp.ipynb": notebook("ada's first"),
    "lovelaceada_101_9002_lab1_ddp-1.ipynb": notebook("ada"),
    "ngkim_LATE_102_9003_my work.ipynb": notebook("kim"),
    "dasilvamüllerzoë_103_9004_notes.txt": "not a notebook",
}
MOODLE = {
    "Ada Lovelace_5001_assignsubmission_file_/lab1_ddp.ipynb": notebook("ada"),
    "Ada Lovelace_5001_assignsubmission_onlinetext_/onlinetext.html": "<p>",
    "Team Blue-Kim Ng_5002_assignsubmission_file_/lab1_ddp.ipynb": notebook("kim"),
    "Team Blue-Zoë Da Silva-Müller_5003_assignsubmission_file_/lab1_ddp.ipynb": notebook("kim"),
}
MOODLE_FILES = {
    "Ada Lovelace_5001_assignsubmission_file_lab1_ddp.ipynb": notebook("ada"),
    "Kim Ng_5002_assignsubmission_file_lab1_ddp.ipynb": notebook("kim"),
}
GRADESCOPE = {
    "assignment_1_export/submission_metadata.yml": METADATA,
    "assignment_1_export/submission_7/lab1_ddp.ipynb": notebook("ada"),
    "assignment_1_export/submission_8/lab1_ddp.ipynb": notebook("kim"),
    "assignment_1_export/submission_8/data.txt": "1",
}
BRIGHTSPACE = {
    "index.html": "<html>",
    "11-77 - Ada Lovelace - Nov 5, 2026 1105 AM/lab1_ddp.ipynb": notebook("ada's first"),
    "11-77 - Ada Lovelace - Nov 5, 2026 1105 PM/lab1_ddp.ipynb": notebook("ada"),
    "11-77 - Ada Lovelace - Nov 7, 2026 905 AM/lab1_ddp.ipynb": notebook("ada, too late"),
    "12-77 - Kim Ng - November 6, 2026 1205 AM/lab1_ddp.ipynb": notebook("kim"),
    "13-77 - Zoë Da Silva-Müller - 6 Nov, 2026 0105/lab1_ddp.ipynb": notebook("zoe"),
}
SUBMITTED = {
    "submitted/ada/lab1_ddp/lab1_ddp.ipynb": notebook("ada"),
    "submitted/ada/lab1_ddp/timestamp.txt": "2026-11-05 12:00:00 -0500",
    "submitted/kim/lab1_ddp/lab1_ddp.ipynb": notebook("kim"),
}
EXCHANGE = {
    f"ada+{LAB}+2026-11-05 17:00:00.5 UTC+x/lab1_ddp.ipynb": notebook("ada"),
    f"ada+{LAB}+2026-11-05 17:00:00.5 UTC+x/timestamp.txt": "2026-11-05 17:00:00.5 UTC",
    f"ada+{LAB}+2026-11-08 17:00:00.5 UTC+x/lab1_ddp.ipynb": notebook("ada, too late"),
    f"ada+{LAB}+2026-11-08 17:00:00.5 UTC+x/timestamp.txt": "2026-11-08 17:00:00.5 UTC",
    "kim+other_lab+2026-11-08 17:00:00.5 UTC+x/other_lab.ipynb": notebook("no"),
}
CHECKOUTS = {  # without git, as in a zip; whole repositories
    "lab1-submissions/lab1-lady-ada/labs/lab1_ddp/lab1_ddp.ipynb": notebook("ada"),
    "lab1-submissions/lab1-lady-ada/labs/lab9/lab9.ipynb": notebook("no"),
    "lab1-submissions/lab1-team-blue/labs/lab1_ddp/lab1_ddp.ipynb": notebook("blue"),
}
NONE = ""
EXPECTED = {
    "canvas": (CANVAS, {"ada": ("ada", NONE), "kim": ("kim", LATE)}),
    "moodle": (MOODLE, {"ada": ("ada", NONE), "kim": ("kim", NONE), "zoe": ("kim", NONE)}),
    "moodle, files": (MOODLE_FILES, {"ada": ("ada", NONE), "kim": ("kim", NONE)}),
    "gradescope": (
        GRADESCOPE,
        {
            "ada": ("ada", "2026-11-05 23:05:00.123456 UTC"),
            "kim": ("kim", "2026-11-06 23:00:00 UTC"),
            "zoe": ("kim", "2026-11-06 23:00:00 UTC"),
        },
    ),
    "brightspace": (
        BRIGHTSPACE,
        {
            "ada": ("ada", "2026-11-06 04:05:00 UTC"),
            "kim": ("kim", "2026-11-06 05:05:00 UTC"),
            "zoe": ("zoe", "2026-11-06 06:05:00 UTC"),
        },
    ),
    "nbgrader": (SUBMITTED, {"ada": ("ada", "2026-11-05 17:00:00 UTC"), "kim": ("kim", NONE)}),
    "exchange": (EXCHANGE, {"ada": ("ada", "2026-11-05 17:00:00.500000 UTC")}),
    "checkouts": (
        CHECKOUTS,
        {"ada": ("ada", NONE), "kim": ("blue", NONE), "zoe": ("blue", NONE)},
    ),
}


@pytest.mark.parametrize("zip_", [False, True])
@pytest.mark.parametrize("system", EXPECTED)
def test_a_download_becomes_a_folder_per_student(course, tmp_path, system, zip_, capsys):
    files, expected = EXPECTED[system]
    download = write(tmp_path / "download", files)
    into = run(course, zipped(download) if zip_ else download)
    said = capsys.readouterr().out
    assert marks(into) == expected
    assert "nothing handed in" in said
    for student in expected:
        assert sorted(p.name for p in (into / student / LAB).glob("*.ipynb")) == [f"{LAB}.ipynb"]
        assert f"{student}: " in said
    assert stat.S_IMODE(into.stat().st_mode) == 0o700
    assert not list(tmp_path.glob(".collecting*"))
    if system == "canvas":
        assert "late; its time is not in the download" in said
        assert "NOTHING TO GRADE" in said
        assert "notes.txt" in said
    if system == "exchange":
        assert "kim+other_lab" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", ["canvas", "moodle", "gradescope", "brightspace", "nbgrader", "checkouts"]
)
def test_from_roster_over_download_and_grading_to_published_grades(
    system, monkeypatch, tmp_path, capsys
):
    course = make_course(tmp_path / "course")
    (course.root / "course.toml").write_text(CALENDAR)
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roster.csv").write_text(ROSTER)
    assert main(["roster", "roster.csv"]) == 0
    download = write(tmp_path / "download", EXPECTED[system][0])
    # Who is in the class is known from the gradebook, whose account is whose only from the list.
    known = ["--roster", "roster.csv"] if system == "checkouts" else []
    assert main(["collect", str(zipped(download)), "--lab", LAB, *known]) == 0
    said = capsys.readouterr().out
    into = course.build / "collected"
    assert f"next: autograder grade {into} --lab {LAB}" in said
    found = find_submissions([into], LAB)
    assert {each.student for each in found.submissions} == set(EXPECTED[system][1])
    class_run = ClassRun(course, LAB, 3, True)
    for each in found.submissions:
        record = made_record(each.student, {"setup": "WRONG"}, path=each.path)
        keep(class_run, Submission(each.student, each.path), record)
        take_in(course, record, by_person=0.0)
    to = system if system in ("canvas", "moodle", "gradescope") else "csv"
    main(["publish", "--to", to, "--lab", LAB, "--roster", "roster.csv", "--out", "out"])
    if to == "gradescope":
        assert set(zipfile.ZipFile("out").namelist()) >= {"run_autograder", "setup.sh"}
        return
    rows = list(csv.reader((tmp_path / "out").read_text("utf-8-sig").splitlines()))
    graded = [row for row in rows if any(cell.startswith("95") for cell in row)]
    assert len(graded) == len(EXPECTED[system][1]), rows


def test_all_lists_what_was_handed_in_and_an_extension_moves_the_deadline(course, tmp_path, capsys):
    download = write(tmp_path / "download", BRIGHTSPACE)
    into = run(course, download, "--all")
    said = capsys.readouterr().out.splitlines()
    mine = [line for line in said if "Ada Lovelace" in line]
    assert [line[:6] for line in mine] == ["ada: 1", "      ", "    * ", "      "]
    assert mine[-1].endswith("2026-11-07 09:05 EST, late")
    extensions = course.build / "extensions.json"
    extensions.write_text(json.dumps({LAB: {"ada": "2026-11-08T00:00:00+00:00"}}))
    try:
        run(course, download)
    finally:
        extensions.unlink()
    assert marks(into)["ada"][0] == "ada, too late"


def test_who_is_not_in_the_class_is_named_with_the_nearest_and_nothing_is_written(
    course, tmp_path, capsys
):
    files = {name.replace("Kim Ng", "Kim Ngg"): text for name, text in MOODLE_FILES.items()}
    files["Xyz Qqq_5003_assignsubmission_file_lab1_ddp.ipynb"] = notebook("who")
    download = write(tmp_path / "download", files)
    run(course, download, code=2)
    said = capsys.readouterr().err
    assert "Kim Ngg (5002): not in the class list; did you mean kim?" in said
    assert "Xyz Qqq (5003): not in the class list" in said
    assert not (tmp_path / "got").exists()
    into = run(course, download, "--as", "Kim Ngg=kim", "--as", "Xyz Qqq=")
    assert set(marks(into)) == {"ada", "kim"}
    run(course, download, "--as", "Kim Ngg=kimm", "--as", "Xyz Qqq=", "--as", "No=ada", code=2)
    said = capsys.readouterr().err
    assert "the class has no 'kimm'" in said
    assert "'No' of --as is not in the download" in said


def test_a_name_that_two_people_have_or_that_is_not_that_of_the_id_stops(course, tmp_path, capsys):
    (tmp_path / "roster.csv").write_text(ROSTER + "ad2,Ada,Lovelace,ad2@x.org,105,x,\n")
    run(course, write(tmp_path / "moodle", MOODLE_FILES), code=2)
    assert "Ada Lovelace (5001): could be ad2 or ada" in capsys.readouterr().err
    files = {"ngkim_101_9_lab1_ddp.ipynb": notebook("kim"), **CANVAS}
    run(course, write(tmp_path / "canvas", files), code=2)
    assert "its id is that of ada, its name that of kim" in capsys.readouterr().err
    assert not (tmp_path / "got").exists()
    into = run(course, write(tmp_path / "canvas2", CANVAS))  # the id tells which Ada
    assert marks(into)["ada"][0] == "ada"


def test_two_people_whose_name_the_class_list_has_once_are_not_taken_for_one(
    course, tmp_path, capsys
):
    other = {"Kim Ng_5009_assignsubmission_file_lab1_ddp.ipynb": notebook("another Kim")}
    run(course, write(tmp_path / "download", MOODLE_FILES | other), code=2)
    assert "Kim Ng (5009): 5009 and 5002 are both kim" in capsys.readouterr().err
    into = run(course, tmp_path / "download", "--as", "Kim Ng (5009)=")
    assert marks(into)["kim"][0] == "kim"


def test_part_of_a_name_is_nobody_elses(course, tmp_path, capsys):
    files = {"Anne-Kim Ng_5_assignsubmission_file_lab1_ddp.ipynb": notebook("anne"), **MOODLE_FILES}
    run(course, write(tmp_path / "download", files), code=2)
    assert "Anne-Kim Ng (5): not in the class list; did you mean kim" in capsys.readouterr().err


def test_collecting_again_replaces_what_was_collected_and_nothing_else(course, tmp_path):
    into = run(course, write(tmp_path / "download", GRADESCOPE))
    (into / "ada" / LAB / "my remarks.txt").write_text("good")
    write(into, {"ada/lab9/lab9.ipynb": notebook("lab9")})
    write(
        tmp_path / "download" / "assignment_1_export",
        {"submission_7/lab1_ddp.ipynb": notebook("ada again")},
    )
    run(course, tmp_path / "download")
    assert marks(into)["ada"][0] == "ada again"
    assert (into / "ada" / LAB / "my remarks.txt").read_text() == "good"
    assert (into / "ada" / "lab9" / "lab9.ipynb").exists()
    # Of another system, without times: the old time is gone.
    run(course, write(tmp_path / "moodle", MOODLE_FILES))
    assert marks(into)["ada"] == ("ada", "")


def test_the_download_may_be_the_folder_in_which_one_is(course, tmp_path, monkeypatch):
    write(tmp_path / "download", MOODLE_FILES)
    (tmp_path / "roster.csv").rename(tmp_path / "download" / "roster.csv")
    monkeypatch.chdir(tmp_path / "download")
    assert set(marks(run(course, "."))) == {"ada", "kim"}


def test_two_notebooks_that_could_be_meant_stop_everything(course, tmp_path, capsys):
    files = {
        **SUBMITTED,
        "submitted/ned/lab1_ddp/one.ipynb": notebook("1"),
        "submitted/ned/lab1_ddp/two.ipynb": notebook("2"),
    }
    run(course, write(tmp_path / "download", files), code=2)
    assert "ned: several notebooks of lab1_ddp: one.ipynb, two.ipynb" in capsys.readouterr().err
    for name in ("one", "two"):  # that say nothing about their lab
        files[f"submitted/ned/lab1_ddp/{name}.ipynb"] = notebook(name, "another")
    run(course, write(tmp_path / "download", files), code=2)
    assert "none of which says that it is of lab1_ddp: ned" in capsys.readouterr().err
    assert not (tmp_path / "got").exists()


def test_a_zip_that_a_student_handed_in_is_opened_and_a_broken_one_is_named(
    course, tmp_path, capsys
):
    inner = zipped(write(tmp_path / "inner", {"work/lab1_ddp.ipynb": notebook("ada")}))
    folder = write(tmp_path / "download", {"kim/lab1_ddp/x.zip": "no zip"})
    target = folder / "ada" / LAB / "all.zip"
    target.parent.mkdir(parents=True)
    target.write_bytes(inner.read_bytes())
    into = run(course, folder)
    assert marks(into)["ada"][0] == "ada"
    assert "x.zip is no zip that can be read" in capsys.readouterr().out


def commit(checkout, mark, when):
    write(checkout, {f"labs/{LAB}/{LAB}.ipynb": notebook(mark)})
    about = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", mark]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@x", *words],
            cwd=checkout,
            env=os.environ | about,
            check=True,
        )


def test_of_a_checkout_the_last_commit_before_the_deadline_is_taken(course, tmp_path):
    ada = tmp_path / "download" / "lab1-lady-ada"
    commit(ada, "ada", "2026-11-05T20:00:00-05:00")
    commit(ada, "ada, too late", "2026-11-09T20:00:00-05:00")
    commit(tmp_path / "download" / "lab1-kng", "kim", "2026-11-09T20:00:00-05:00")
    subprocess.run(["git", "init", "-q", tmp_path / "download" / "lab1-ned"], check=True)  # empty
    ran = tmp_path / "ran"
    with (ada / ".git" / "config").open("a") as file:  # of whoever made the checkout
        file.write(f"[core]\n\tfsmonitor = touch {ran}\n[log]\n\tshowSignature = true\n")
        file.write(f"[gpg]\n\tprogram = touch {ran}\n")
    into = run(course, tmp_path / "download")
    assert marks(into) == {
        "ada": ("ada", "2026-11-06 01:00:00 UTC"),
        "kim": ("kim", "2026-11-10 01:00:00 UTC"),
    }
    assert not ran.exists()


def member(name, mode=0o100644, system=3):
    info = zipfile.ZipInfo(name)
    info.external_attr, info.create_system = mode << 16, system
    return info


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (member("../ada.ipynb"), "leads out of the zip"),
        (member("a/../../ada.ipynb"), "leads out of the zip"),
        (member("/etc/ada.ipynb"), "leads out of the zip"),
        (member("C:/ada.ipynb"), "leads out of the zip"),
        (member("..\\ada.ipynb"), "leads out of the zip"),
        (member("ada.ipynb", 0o120777), "symbolic link"),
        (member("ada.ipynb", 0o010644), "symbolic link or no file"),
    ],
)
def test_a_zip_that_leads_elsewhere_is_refused(course, tmp_path, info, said, capsys):
    path = zipped(write(tmp_path / "download", MOODLE_FILES))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    run(course, path, code=2)
    assert said in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["download", "download.zip", "roster.csv"]


def test_zips_that_are_huge_broken_or_locked_are_refused(course, tmp_path, monkeypatch):
    into, roster = tmp_path / "got", read_roster(tmp_path / "roster.csv")

    def refused(said):
        with pytest.raises(DownloadError, match=said):
            collect(course, LAB, path, into, roster=roster)
        assert not into.exists()

    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lovelaceada_101_1_lab1_ddp.ipynb", b" " * (65 << 20))
    refused(r"65 MiB unpacked, \d+ times its size")
    monkeypatch.setattr(unpack, "MAX_FILE_BYTES", 1 << 20)
    refused("has 65 MiB unpacked; at most 1 MiB")
    monkeypatch.setattr(unpack, "MAX_FILES", 0)
    refused("holds 1 files; at most 0")
    path.write_bytes(path.read_bytes()[:-30])
    refused("is no zip that can be read")
    path = zipped(write(tmp_path / "twice", MOODLE_FILES))
    monkeypatch.undo()
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], "other")
    refused("twice")
    path = tmp_path / "nothing"
    refused("there is no file or folder")


def test_a_link_in_a_folder_is_refused_by_name(course, tmp_path, capsys):
    folder = write(tmp_path / "download", SUBMITTED)
    (folder / "submitted" / "ned").symlink_to("/etc")
    (folder / "submitted" / "kim" / LAB / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(folder / "submitted" / "kim" / LAB / "pipe")
    run(course, folder, code=2)
    said = capsys.readouterr().err
    assert "submitted/ned" in said
    assert "pipe" in said
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"readme.txt": ""}, "no download of Canvas, Moodle"),
        ({"1-2 - Ada Lovelace - some day/lab1_ddp.ipynb": ""}, "expected a time such as"),
        ({"submission_metadata.yml": "a: [", "submission_7/x.ipynb": ""}, "cannot be read"),
        ({"submission_metadata.yml": "a: 1", "submission_7/x.ipynb": ""}, "expected :submitters"),
        ({"submission_metadata.yml": "[]", "submission_7/x.ipynb": ""}, "expected :submitters"),
        ({"ada/lab1_ddp/timestamp.txt": "05/12/2026"}, "expected a time"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(course, tmp_path, files, said, capsys):
    run(course, write(tmp_path / "download", files), code=2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "got").exists()


def test_without_a_class_list_the_command_says_how_to_get_one(course, tmp_path, capsys):
    assert main(["collect", str(write(tmp_path / "d", MOODLE)), "--lab", LAB]) == 2
    assert "autograder roster FILE.csv" in capsys.readouterr().err


def test_github_classrooms_list_tells_whose_checkout_it_is(course, tmp_path):
    text = "identifier,github_username,github_id,name\nada,lady-ada,1,Ada Lovelace\nkim,kng,2,\n"
    (tmp_path / "roster.csv").write_text(text)
    files = {f"lab1-{name}/lab1_ddp.ipynb": notebook(name) for name in ("lady-ada", "kng")}
    into = run(course, write(tmp_path / "download", files))
    assert {student: mark for student, (mark, _) in marks(into).items()} == {
        "ada": "lady-ada",
        "kim": "kng",
    }
