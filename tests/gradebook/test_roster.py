"""Class lists: what other systems export is read, what is wrong in them is named by its line."""

from __future__ import annotations

import contextlib
import sqlite3
import unicodedata

import pytest
from made_records import make_course

from autograder.__main__ import main
from autograder.course.course import CourseError
from autograder.gradebook.database import Person, gradebook_path, open_gradebook, same_name
from autograder.gradebook.roster import RosterError, import_roster, read_roster

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Lab 1 (77),Final Score

    Points Possible,,,,,100,(read only)
"Lovelace, Ada",101,s-1,ada,A,,
Kim,102,s-2,kim,A,,
"Student, Test",9,,test,A,,
"""
MOODLE = "First name;Last name;ID number;Email address;Assignment: Lab 1 (Real)\n"
MOODLE += "Ada;Lovelace;0101;ada@x.org;-\nKim;Ng;0102;kim@x.org;-\n"
GRADESCOPE = "Name,SID,Email,Role\nAda Lovelace,ada,ada@x.org,Student\n"
NBGRADER = "id,first_name,last_name,email,lms_user_id\nada,Ada,Lovelace,ada@x.org,101\n"


@pytest.fixture
def read(tmp_path):
    def read(text, id_column=None):
        path = tmp_path / "list.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_roster(path, id_column)

    return read


def test_what_canvas_exports(read):
    roster = read(CANVAS)
    ada, kim = roster.people
    assert ada == Person(
        line=4,
        id="ada",
        first_name="Ada",
        last_name="Lovelace",
        lms_id="101",
        sis_user_id="s-1",
        sis_login_id="ada",
        section="A",
    )
    assert (kim.first_name, kim.last_name) == ("", "Kim")
    assert "Lab 1 (77)" in roster.columns
    assert ada.names() == {"ada", "LMS 101", "s-1"}
    without_login = CANVAS.replace("SIS Login ID", "Nickname")
    assert [p.id for p in read(without_login).people] == ["s-1", "s-2"]


def test_what_moodle_gradescope_and_nbgrader_export(read):
    ada, kim = read(MOODLE).people
    assert (ada.id, ada.lms_id, ada.email, kim.last_name) == ("0101", "0101", "ada@x.org", "Ng")
    [ada] = read(GRADESCOPE).people
    assert (ada.id, ada.first_name, ada.last_name) == ("ada", "Ada", "Lovelace")
    [ada] = read(NBGRADER).people
    assert (ada.id, ada.email, ada.lms_id) == ("ada", "ada@x.org", "101")
    assert read(MOODLE, "Email address").people[0].id == "ada@x.org"


def test_byte_order_marks_tabs_quotes_and_blank_lines(read):
    text = '\ufeffStudent ID\tEmail\tName\r\n\r\nada\ta@x.org\t"Lovelace,\r\nAda"\r\n\t\t\r\n'
    text += "kim\tk@x.org\tKim Ng\r\n"
    ada, kim = read(text).people
    assert (ada.id, ada.last_name) == ("ada", "Lovelace")
    assert (kim.line, kim.first_name) == (6, "Kim")


def test_what_excel_and_macos_make_of_it(read):
    [ada] = read("sep=;\nid;email\nAdé;a@x.org\n").people
    assert ada.id == "Adé"
    assert same_name(unicodedata.normalize("NFD", "ADÉ")) in ada.names()


def test_names_that_would_be_html_or_commands_are_refused(read):
    text = 'id,first_name,last_name,section\n<img src=x>,A,B,\na"b,A,B,\n'
    text += "eve,Eve,<script src=//x></script>,\nmax,M\x1b]0;x,Max,\nlea,L,M,<b>\n"
    text += "ada,Ada\xa0Augusta,O'Brien-Müller,A & B\n"
    with pytest.raises(RosterError) as caught:
        read(text)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [f"line {n}" for n in range(2, 7)]
    [ada] = read("\n".join([text.splitlines()[0], text.splitlines()[-1]])).people
    assert (ada.first_name, ada.last_name) == ("Ada Augusta", "O'Brien-Müller")


def test_names_in_columns_of_their_own_staff_and_empty_columns(read):
    ada, kim = read("id,First name,Name\nada,Ada,van Rossum\nkim,Kim,Kim Ng\n").people
    assert (ada.first_name, ada.last_name) == ("Ada", "van Rossum")
    assert (kim.first_name, kim.last_name) == ("Kim", "Ng")
    assert [p.id for p in read(GRADESCOPE + "Boss,boss,b@x.org,Instructor\n").people] == ["ada"]
    without = MOODLE.replace("0101", "").replace("0102", "")
    assert [p.id for p in read(without).people] == ["ada@x.org", "kim@x.org"]
    with pytest.raises(RosterError, match="line 3: no id"):
        read("id,email,lms_user_id\nada,a@x.org,101\n,,102\n")


def test_every_wrong_line_is_named(read):
    text = "id,email\nada,ada@x.org\n,x@x.org\nada,b@x.org\nkim,nowhere\nlea\nmax,ADA@x.org\n"
    text += "a/b,c@x.org\n.hidden,d@x.org\n" + "z" * 200 + ",e@x.org\n"
    with pytest.raises(RosterError) as caught:
        read(text)
    said = str(caught.value)
    for line in (
        "line 3: no id",
        "line 4: id 'ada' is on line 2 too",
        "line 5: 'nowhere' is not an email address",
        "line 6: 1 cells, expected 2",
        "line 7: email 'ADA@x.org' is on line 2 too",
        "line 8: 'a/b' cannot be a student's id",
        "line 9: '.hidden' cannot be",
        "line 10: id has 200 characters, at most 128",
    ):
        assert line in said
    with pytest.raises(RosterError, match="and 30 more"):
        read("id,email\n" + "ada,\n" * 51)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("id,email\n", "nobody is in it"),
        ("colour,shape\nred,round\n", "no column tells the students' ids.*colour, shape"),
        (b"id,name\nada,Ren\xe9\n", "line 2: not UTF-8"),
        ('id,name\nada,"Ad"a"\n', "line 2"),
    ],
)
def test_what_is_no_class_list(read, text, says):
    with pytest.raises(RosterError, match=says):
        read(text)


def test_a_column_or_file_that_is_not_there(read, tmp_path):
    with pytest.raises(RosterError, match="no column 'nick'"):
        read(NBGRADER, "nick")
    with pytest.raises(RosterError, match="No such file"):
        read_roster(tmp_path / "nowhere.csv")


# --- into nbgrader ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return make_course(tmp_path_factory.mktemp("course"))


def students(course):
    with open_gradebook(course) as book:
        return {s.id: (s.first_name, s.last_name, s.email, s.lms_user_id) for s in book.students}


def test_importing_twice_changes_nothing_and_removes_nobody(course, read, monkeypatch, capsys):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    path = read(NBGRADER).path
    assert main(["roster", str(path), "--dry-run"]) == 0
    assert "1 would be new" in capsys.readouterr().out
    assert students(course) == {}
    assert main(["roster", str(path)]) == 0
    assert students(course) == {"ada": ("Ada", "Lovelace", "ada@x.org", "101")}
    assert import_roster(course, read(NBGRADER)).same == ["ada"]
    done = import_roster(course, read("id,email,last_name\nada,new@x.org,\nkim,,Ng\n"))
    assert done.added == ["kim"]
    assert done.changed == {"ada": ["email: ada@x.org → new@x.org"]}
    assert students(course)["ada"] == ("Ada", "Lovelace", "new@x.org", "101")  # no cell, no change
    assert import_roster(course, read("id\nlea\n")).others == ["ada", "kim"]
    assert students(course).keys() == {"ada", "kim", "lea"}


def test_capitals_and_accents_make_nobody_new(course, read):
    import_roster(course, read("id\nadé\n"))
    done = import_roster(course, read(f"id,last_name\n{unicodedata.normalize('NFD', 'ADÉ')},A\n"))
    assert (done.added, list(done.changed)) == ([], ["adé"])
    assert "adé" not in done.others


def test_a_gradebook_that_somebody_else_writes_to_is_left_alone(course, read):
    roster = read("id,last_name\nkim,Locked\n")
    import_roster(course, read("id\nkim\n"))
    before = students(course)
    with contextlib.closing(sqlite3.connect(gradebook_path(course))) as other:
        other.execute("begin exclusive")
        with pytest.raises(CourseError, match="locked"):
            import_roster(course, roster)
    assert students(course) == before


def test_a_wrong_list_changes_nothing(course, read, monkeypatch, capsys):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    before = students(course) if (course.build / "nbgrader").exists() else {}
    path = read(NBGRADER).path
    path.write_text("id,email\nmax,max@x.org\nzoe,nowhere\n")
    assert main(["roster", str(path)]) == 2
    assert "line 3" in capsys.readouterr().err
    assert students(course) == before


@pytest.mark.parametrize(
    "header",
    [
        "Vorname,Nachname,ID-Nummer,E-Mail-Adresse,Anmeldename",
        "Prénom,Nom de famille,Numéro d'identification,Adresse de courriel,Nom d’utilisateur",
        "Nombre,Apellido(s),Número de ID,Dirección de correo,Nombre de usuario",
        "Nome,Cognome,Codice identificativo,Indirizzo email,Nome utente",
        "Voornaam,Achternaam,ID-nummer,E-mailadres,Gebruikersnaam",
        "Vorname;Name;Matrikelnummer;E-Mail;Anmeldename",
    ],
)
def test_lists_in_other_languages_lose_no_name(tmp_path, header):
    path = tmp_path / "list.csv"
    separator = ";" if ";" in header else ","
    path.write_text(f"{header}\nÄda,Ng-Öz,77,ada@x.org,ada\n".replace(",", separator), "utf-8")
    roster = read_roster(path)
    [person] = roster.people
    assert (person.id, person.first_name, person.last_name) == ("ada", "Äda", "Ng-Öz")
    assert person.email == "ada@x.org"


def test_a_column_that_is_not_known_is_told(tmp_path, monkeypatch, capsys):
    course = make_course(tmp_path / "course")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    path = tmp_path / "list.csv"
    path.write_text("id,Etunimi,Sukunimi\nada,Äda,Ng\n", "utf-8")
    assert main(["roster", str(path)]) == 0
    said = capsys.readouterr().out
    assert "NOBODY HAS A NAME" in said
    assert "columns that are not used: Etunimi, Sukunimi" in said
