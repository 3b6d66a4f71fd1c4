"""Reads a class list from Canvas, Moodle, Gradescope or nbgrader, and puts it into nbgrader.

A column's name tells its meaning. These names are known, and Moodle's names in German, French,
Spanish, Italian, Dutch and Portuguese; case, accents and punctuation do not matter:

    id          student_id, username, SIS Login ID, login, netid, SID, id  (the folder's name)
    names       first_name, last_name, surname, or both as Student, name, full name
    email       email, Email address
    LMS id      lms_user_id, canvas_id, ID number, Identifier; of Canvas's export: ID
    GitHub      github_username; the id is then GitHub Classroom's identifier
    group       group_name, group, team
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbgrader.api import Student

from autograder.course.course import Course
from autograder.gradebook.database import Person, open_gradebook, same_name

_COLUMNS = {
    "id": (
        *("studentid", "username", "sisloginid", "loginid", "login", "netid", "sid", "id"),
        *("anmeldename", "benutzername", "matrikelnummer", "matrikelnr", "matnr"),
        *("nomdutilisateur", "nombredeusuario", "nomeutente", "gebruikersnaam"),
        *("nomedeusuario", "identificacaodousuario"),
    ),
    "first_name": (
        *("firstname", "givenname", "forename", "vorname", "prenom", "nombre", "nome", "voornaam"),
    ),
    "last_name": (
        *("lastname", "surname", "familyname", "nachname", "familienname", "nomdefamille"),
        *("apellidos", "apellido", "cognome", "achternaam", "sobrenome", "apelido"),
    ),
    "name": (
        *("student", "name", "fullname", "vollstandigername", "nomcomplet", "nombrecompleto"),
        *("nomecompleto", "nomeecognome", "volledigenaam", "nom"),
    ),
    "email": (
        *("email", "emailaddress", "mail", "emailadresse", "mailadresse", "adressedecourriel"),
        *("courriel", "direcciondecorreo", "correoelectronico", "correo", "indirizzoemail"),
        *("emailadres", "enderecodeemail", "adresseemail", "adresseelectronique"),
    ),
    "lms_id": (
        *("lmsuserid", "lmsid", "canvasid", "canvasuserid", "idnumber", "idnummer"),
        *("numerodidentification", "numerodeid", "numerodeidentificacion", "numeroid"),
        *("codiceidentificativo", "numerodeidentificacao", "identifier"),
    ),
    "github": ("githubusername", "githubuser", "githublogin", "github"),
    "group": ("groupname", "group", "teamname", "team", "gruppe", "groupe", "grupo", "gruppo"),
    "sis_user_id": ("sisuserid", "idnumber", "idnummer"),
    "sis_login_id": ("sisloginid",),
    "section": ("section", "sections"),
    "role": ("role",),
}
_STAFF = ("instructor", "ta", "reader")  # roles in Gradescope's lists
_EMAIL = re.compile(r"[^\s@,;<>/\\\"']+@[^\s@,;<>/\\\"']+\.[^\s@,;<>/\\\"']+")
# nbgrader treats some of these characters as patterns, folder names cannot have some of them, and
# formgrader writes ids and names unescaped, so that a browser would read some as HTML.
_NOT_IN_ID = set(',/[]*?{}+<>"&')
_NOT_IN_NAMES = set("<>")
MAX_CHARS = 128  # length of nbgrader's database columns
MAX_SHOWN = 20


class RosterError(ValueError):
    """The file is not a class list; the message names every line that is wrong."""


@dataclass(frozen=True)
class Roster:
    """A class list.

    Attributes:
        columns: the names of its columns.
        unused: the columns whose meaning is not known.
    """

    path: Path
    people: tuple[Person, ...]
    columns: tuple[str, ...]
    unused: tuple[str, ...] = ()


def read_roster(path: Path, id_column: str | None = None) -> Roster:
    """Reads a class list.

    Args:
        id_column: the column with the students' ids in nbgrader; needed if no known name fits.

    Raises:
        RosterError: the file cannot be read, or lines in it are wrong.
    """
    rows = _rows(path)
    if not rows:
        raise RosterError(f"{path}: the file is empty")
    (_, header), *rows = rows
    places = _places(path, header, rows, id_column)
    people: list[Person] = []
    problems: list[tuple[int, str]] = []
    for line, row in rows:
        values = {
            name: " ".join(row[place].split()) for name, place in places.items() if place < len(row)
        }
        if not any(values.values()) or _is_no_person(values):
            continue
        if len(row) != len(header):
            problems.append((line, f"{len(row)} cells, expected {len(header)}"))
            continue
        person = _person(line, values)
        problems += [(line, problem) for problem in _wrong(person)]
        people.append(person)
    problems += _doubled(people, "id") + _doubled(people, "email") + _doubled(people, "lms_id")
    if problems:
        more = len(problems) - MAX_SHOWN
        shown = [f"line {line}: {problem}" for line, problem in sorted(problems)[:MAX_SHOWN]]
        shown += [f"and {more} more"] if more > 0 else []
        raise RosterError("\n  ".join([f"{path}:", *shown]))
    if not people:
        raise RosterError(f"{path}: nobody is in it")
    unused = tuple(name for place, name in enumerate(header) if place not in places.values())
    return Roster(path, tuple(people), tuple(header), unused)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Line number and cells of every line that is not empty."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RosterError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RosterError(f"{path}: line {line}: not UTF-8 text; save it as UTF-8 CSV") from None
    text = re.sub(r"\Asep=.\r?\n", "", text)  # Excel's line that names the separator
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = []
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise RosterError(f"{path}: line {reader.line_num}: {error}") from None
    return rows


def _places(
    path: Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]], id_column: str | None
) -> dict[str, int]:
    """Field -> index of its column. A column that is empty on every line does not count."""
    plain = [_plain(name) for name in header]
    used = [
        name
        for place, name in enumerate(plain)
        if not rows or any(row[place : place + 1] and row[place].strip() for _, row in rows)
    ]
    found = {
        name: next(plain.index(alias) for alias in aliases if alias in used)
        for name, aliases in _COLUMNS.items()
        if any(alias in used for alias in aliases)
    }
    if {"student", "id", "section"} <= set(plain):  # in Canvas's export, ID is Canvas's own number
        found["lms_id"] = plain.index("id")
        if found["id"] == found["lms_id"] and "sis_user_id" in found:
            found["id"] = found["sis_user_id"]
    if id_column is not None:
        if id_column not in header:
            raise RosterError(f"{path}: no column {id_column!r}; it has: {', '.join(header)}")
        found["id"] = header.index(id_column)
    if "github" in found and found.get("lms_id") == (place := _index(plain, "identifier")):
        found.setdefault("id", place)
        del found["lms_id"]
    for other in ("lms_id", "email"):
        if "id" not in found and other in found:
            found["id"] = found[other]
    if "id" not in found:
        known = "student_id, username, SIS Login ID, SID, id or email"
        raise RosterError(
            f"{path}: no column tells the students' ids: expected {known}, or name one with "
            f"--id; it has: {', '.join(header)}"
        )
    return found


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1


def _plain(name: str) -> str:
    """A column's name in small letters and digits, without accents; ß is ss."""
    apart = unicodedata.normalize("NFKD", name.casefold())
    return re.sub(r"[^a-z0-9]", "", apart)


def _is_no_person(values: Mapping[str, str]) -> bool:
    """Whether a line is no student: Canvas's extra header lines, its test student, or staff."""
    name = values.get("name", "")
    return (
        "Points Possible" in name
        or name == "Student, Test"
        or values.get("role", "").casefold() in _STAFF
        or not (values["id"] or name or values.get("email") or values.get("lms_id"))
    )


def _person(line: int, values: dict[str, str]) -> Person:
    name = values.pop("name", "")
    values.pop("role", None)
    if name and not values.get("last_name"):
        last, comma, first = name.partition(",")
        # With a column for first names, "Name" holds the last name or both names.
        if not comma and (given := values.get("first_name", "")):
            first, last = given, name.removeprefix(f"{given} ")
        elif not comma:
            first, _, last = name.rpartition(" ")
        values |= {"first_name": first.strip(), "last_name": last.strip()}
    return Person(line=line, **values)


def may_be_id(name: str) -> bool:
    """Whether nbgrader can store and show a student id like this."""
    return not (
        not name or name.startswith(".") or set(name) & _NOT_IN_ID or not name.isprintable()
    )


def _wrong(person: Person) -> list[str]:
    problems = []
    if not person.id:
        problems.append("no id")
    elif not may_be_id(person.id):
        problems.append(f"{person.id!r} cannot be a student's id in nbgrader")
    if person.email and not _EMAIL.fullmatch(person.email):
        problems.append(f"{person.email!r} is not an email address")
    for name, value in vars(person).items():
        if name in ("line", "id", "email"):
            continue
        if set(value) & _NOT_IN_NAMES or any(unicodedata.category(c) == "Cc" for c in value):
            problems.append(f"{name}: {value!r} has a sign that a page or a terminal would act on")
    problems += [
        f"{name} has {len(value)} characters, at most {MAX_CHARS} are kept"
        for name, value in vars(person).items()
        if isinstance(value, str) and len(value) > MAX_CHARS
    ]
    return problems


def _doubled(people: Sequence[Person], what: str) -> list[tuple[int, str]]:
    first: dict[str, int] = {}
    problems = []
    for person in people:
        value = getattr(person, what)
        if value and same_name(value) in first:
            where = first[same_name(value)]
            problems.append((person.line, f"{what} {value!r} is on line {where} too"))
        first.setdefault(same_name(value), person.line)
    return problems


# --- into nbgrader ------------------------------------------------------------------------------


@dataclass
class Imported:
    """The result of an import: ids that were added, changed, unchanged, or not in the list."""

    added: list[str] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)  # id -> "email: old -> new"
    same: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # in the gradebook, not in the list


def import_roster(course: Course, roster: Roster, *, dry: bool = False) -> Imported:
    """Puts a class list into nbgrader's gradebook: the whole list, or nothing if that fails.

    An empty value in the list changes nothing, and nobody is removed.

    Args:
        dry: change nothing, only report what would be done.
    """
    done = Imported()
    with open_gradebook(course, create=True) as book:
        students = {str(student.id): student for student in book.db.query(Student)}
        known = {same_name(name): student for name, student in students.items()}
        for person in roster.people:
            wanted = {
                "first_name": person.first_name,
                "last_name": person.last_name,
                "email": person.email,
                "lms_user_id": person.lms_id,
            }
            wanted = {name: value for name, value in wanted.items() if value}
            student = students.get(person.id) or known.get(same_name(person.id))
            if student is None:
                book.db.add(Student(id=person.id, **wanted))
                done.added.append(person.id)
                continue
            news = {n: v for n, v in wanted.items() if getattr(student, n) != v}
            if not news:
                done.same.append(str(student.id))
                continue
            done.changed[str(student.id)] = [
                f"{name}: {getattr(student, name) or '(none)'} → {value}"
                for name, value in news.items()
            ]
            for name, value in news.items():
                setattr(student, name, value)
        listed = {same_name(person.id) for person in roster.people}
        done.others = sorted(name for name in students if same_name(name) not in listed)
        if dry:
            book.db.rollback()
        else:
            book.db.commit()
    return done
