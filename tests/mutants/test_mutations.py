"""The tool that tries the tests is worth what it changes: each kind of change, and what it leaves alone."""

from pathlib import Path

import pytest

from tests.mutants.mutations import Mutant, lua_mutants, python_mutants, within
from tests.mutants.subjects import SUBJECTS, Subject
from tests.mutants.survivors import SURVIVORS, explained_by, read, stale
from tests.mutants.trial import PACKAGE, ROOT, Fate, Trial, mutants_of


def lines(mutants: list[Mutant]) -> set[tuple[str, str]]:
    return {(one.operator, one.after) for one in mutants}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {("comparison", "(a <= b)"), ("comparison", "(a >= b)")}),
        ("a is None", {("comparison", "(a is not None)")}),
        ("a and b", {("boolean", "(a or b)")}),
        ("not a", {("boolean", "(a)")}),
        ("x = 0", {("constant", "x = 1"), ("deleted", "pass")}),
        ("x = 1", {("constant", "x = 2"), ("constant", "x = 0"), ("deleted", "pass")}),
        ("x = ''", {("constant", "x = 'mutant'"), ("deleted", "pass")}),
        ("x = a + b", {("arithmetic", "x = (a - b)"), ("deleted", "pass")}),
        ("x -= a", {("arithmetic", "x += a"), ("deleted", "pass")}),
        ("f()", {("deleted", "pass")}),
        ("MAX = 2 * x", {("arithmetic", "MAX = (2 + x)"), ("constant", "MAX = 3 * x"), ("deleted", "pass")}),
        ("def f():\n    return x", {("return", "return None")}),
        ("{x for x in y if x}", {("condition", f"{{x for x in y if {value}}}") for value in (True, False)}),
    ],
)
def test_python_is_changed_in_one_place(source: str, expected: set[tuple[str, str]]) -> None:
    assert lines(python_mutants(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "import os",
        "assert x > 0, 'text'",
        "log.info('text', extra={'count': 1})",
        "LIMIT_MAX = 500",
        "LIMIT_MAX = 8 * 1024",
        "_EVERY_S, _PAUSE_S = 0.5, 0.05",
        "x: int",
        "def f(x: 'A | None') -> 'B': ...",
    ],
)
def test_what_is_told_to_people_or_tuned_is_left_alone(source: str) -> None:
    assert python_mutants(source) == []


def test_an_error_may_be_left_out_but_its_text_is_its_own() -> None:
    assert lines(python_mutants("if x:\n    raise ValueError('text')")) == {
        ("deleted", "pass"),
        ("condition", "if True:"),
        ("condition", "if False:"),
    }


def test_a_mutant_differs_in_the_line_it_names() -> None:
    source = "a = f(\n    'Ü', 7,\n)\n"
    (seven,) = (one for one in python_mutants(source) if one.after == "'Ü', 8,")
    assert (seven.line, seven.before, seven.text) == (2, "'Ü', 7,", source.replace("7", "8"))


def test_of_a_file_only_the_sections_that_are_named_are_changed() -> None:
    source = "a()\n# ---- one ----\n#\n# About it.\nb()\n# ---- two ----\nc()\n# ---- three ----\nd()\n"
    mutants = python_mutants(source)
    assert [one.before for one in within(source, ("one", "three"), mutants)] == ["b()", "d()"]
    with pytest.raises(ValueError, match="no section has the header four"):
        within(source, ("one", "four"), mutants)


def test_lua_is_changed_outside_of_comments() -> None:
    script = (
        "-- if x == 1 then\nlocal LIMIT = 7 * 3600\nfor i = a, b do\n"
        "if redis.call('GET', k) == 'a' and not b then\n  n = n + 1\nend\nreturn n\n"
    )
    assert lines(lua_mutants(script)) == {
        ("constant", "if redis.call('', k) == 'a' and not b then"),
        ("constant", "if redis.call('GET', k) == '' and not b then"),
        ("comparison", "if redis.call('GET', k) ~= 'a' and not b then"),
        ("boolean", "if redis.call('GET', k) == 'a' or not b then"),
        ("boolean", "if redis.call('GET', k) == 'a' and b then"),
        ("condition", "if true then"),
        ("condition", "if false then"),
        ("arithmetic", "n = n - 1"),
        ("constant", "n = n + 2"),
        ("constant", "n = n + 0"),
        ("deleted", ""),
        ("return", "return nil"),
    }


def test_every_script_is_a_subject_and_every_guard_is_there() -> None:
    subjects = {one.path for one in SUBJECTS}
    assert {str(file.relative_to(ROOT / PACKAGE)) for file in (ROOT / PACKAGE).rglob("*.lua")} <= subjects
    missing = {guard for one in SUBJECTS for guard in one.guards if not (ROOT / "tests" / guard).exists()}
    assert not missing


def test_a_file_is_named_once() -> None:
    paths = [one.path for one in SUBJECTS]
    assert sorted(paths) == sorted(set(paths))


def test_what_is_explained_names_a_subject() -> None:
    assert set(read(SURVIVORS)) <= {one.path for one in SUBJECTS}


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.path)
def test_what_is_explained_is_still_there(subject: Subject) -> None:
    mutants = mutants_of(subject)
    assert mutants, "a subject that cannot be changed says nothing of its tests"
    assert stale(read(SURVIVORS).get(subject.path, {}), mutants) == []


def test_a_stanza_says_module_operator_line_and_why(tmp_path: Path) -> None:
    file = tmp_path / "survivors.txt"
    file.write_text(
        "# About it.\n\nworker/x.py: comparison\n    - if a: c\n    + if a: b\n    because\n    so\n\n"
    )
    known = read(file)["worker/x.py"]
    place = ("comparison", "if a: c", "if a: b")
    assert known == {place: "because so"}
    assert explained_by(known, Mutant("comparison", 1, "if a: c", "if a: b", "")) == place
    assert explained_by(known, Mutant("boolean", 1, "if a: c", "if a: b", "")) is None
    assert explained_by(known, Mutant("comparison", 1, "if d", "if a: b", "")) is None


def test_mutants_of_a_script_are_told_apart_by_one_run_of_its_guards(tmp_path: Path) -> None:
    subject = Subject("brokers/redis/cluster.lua", ("brokers/test_redis_scripts_stores.py",))
    trial = Trial(tmp_path / "trial")
    source = (ROOT / PACKAGE / subject.path).read_text()
    broken = source.replace("local uniques = ", "error('broken')\nlocal uniques = ")
    texts = (f"{source}-- harmless\n", broken, f"-- harmless\n{source}")
    mutants = [Mutant("none", 1, "", "", text) for text in texts]
    assert trial.run_scripts(subject, mutants) == [Fate.SURVIVED, Fate.KILLED, Fate.SURVIVED]
    assert (tmp_path / "trial" / PACKAGE / subject.path).read_text() == source


def test_guards_kill_what_they_see_and_let_the_rest_survive(tmp_path: Path) -> None:
    """By real processes on a copy: a change of behaviour, and one that makes no difference."""
    subject = Subject("text.py", ("test_urls.py",), ("urls",))
    trial = Trial(tmp_path / "trial")
    trial.prepare(subject)  # passes on the source, fails on a module that cannot be loaded
    source = (ROOT / PACKAGE / subject.path).read_text()
    harmless = Mutant("none", 1, "", "", f"{source}\n_UNUSED = 1\n")
    assert trial.run(subject, harmless) is Fate.SURVIVED
    assert Fate.KILLED in {trial.run(subject, one) for one in mutants_of(subject)[:3]}
    assert (tmp_path / "trial" / PACKAGE / subject.path).read_text() == source
