"""D4: the published tables are read by SQL, without a JVM, and nothing else can be reached."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.history.published import Story, publish
from umbel.errors import BadQuery, HistoryError, NothingBuilt
from umbel.events.tables import TABLES
from umbel.history import query
from umbel.history.query import Answer, Tables, as_csv, for_spreadsheets, read
from umbel.history.tables import newest_build, percentiles

STORY = Story(tasks=40)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("lake"), STORY.rows, events=160)


def ask(lake: Path, sql: str, **options: float) -> Answer:
    return read(lake, lambda tables: tables.ask(sql, **options))  # type: ignore[arg-type]


def test_every_table_can_be_read(lake: Path) -> None:
    for name, table in TABLES.items():
        answer = ask(lake, f"select * from {name}")
        assert answer.columns == table.names
        assert len(answer.rows) == len(STORY.rows[name])


def test_tables_of_an_earlier_version_are_read_under_the_names_of_today(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows)
    renamed = set[str]()
    for path in (tmp_path / "tables").rglob("*.parquet"):
        written = pq.read_table(path)
        if "task_id" in written.column_names:
            renamed.add(path.parent.name)
            pq.write_table(written.rename_columns({"task_id": "uuid"}), path)
    assert renamed == {"tasks", "attempts", "timeline", "anomalies"}
    for name in renamed:
        told = [row["task_id"] for row in ask(tmp_path, f"select * from {name}").dicts()]
        assert told == [row.get("task_id") for row in STORY.rows[name]]


@pytest.mark.parametrize(("name", "other"), [("a[b]", "ab"), ("a*", "ab"), ("a?", "ab"), ("{a,b}", "a")])
def test_a_lake_whose_name_would_be_a_pattern_is_read_and_its_neighbour_is_not(
    tmp_path: Path, name: str, other: str
) -> None:
    publish(tmp_path / name, STORY.rows)
    publish(tmp_path / other, {"tasks": STORY.rows["tasks"][:3]})
    assert ask(tmp_path / name, "select count(*) from tasks").rows == [(40,)]


def test_times_are_told_in_utc(lake: Path) -> None:
    told = ask(lake, "select min(online_at)::text from workers").rows
    assert told == [("2026-11-15 09:00:00+00",)]


def test_rows_beyond_the_limit_are_left_out_and_said(lake: Path) -> None:
    answer = ask(lake, "select task_id from tasks", limit=39)
    assert (len(answer.rows), answer.more) == (39, True)
    assert not ask(lake, "select task_id from tasks", limit=40).more


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("selec 1", 'line 1, column 1: syntax error at or near "selec"'),
        ("select 'é',\n  nme from tasks", 'line 2, column 3: Referenced column "nme" not found'),
        ("select uuid from tasks", "line 1, column 8: unknown column 'uuid'; it is called 'task_id'"),
        ("select * from task", "line 1, column 15: unknown table 'task'; the tables are tasks, attempts"),
        ("select 1; select 2", "got 2 queries; give one at a time"),
        ("", "got 0 queries; give one at a time"),
        ("select ?", "Values were not provided"),
    ],
)
def test_a_wrong_query_is_refused_with_the_place(lake: Path, sql: str, problem: str) -> None:
    with pytest.raises(BadQuery) as refused:
        ask(lake, sql)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "sql",
    [
        "create table mine as select 1",
        "drop view tasks",
        "copy tasks to '{folder}/out.csv'",
        "copy tasks to '{file}'",
        "attach '{folder}/other.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access=true",
        "set lock_configuration=false",
        "pragma enable_profiling",
        "select * from read_text('{folder}/secret.txt')",
        "select * from '{folder}/secret.txt'",
        "select * from read_csv('{folder}/*.txt')",
        "select * from glob('{folder}/*')",
        "select * from read_parquet('{folder}/other.parquet')",
        "select * from 'https://example.com/x.parquet'",
        "export database '{folder}/all'",
        "explain analyze copy tasks to '{folder}/out.csv'",
        "explain analyze copy (select 1) to '{file}' (format parquet, use_tmp_file false)",
        "explain analyze create table mine as select 1",
        "explain analyze drop view tasks",
        "explain select 1",
    ],
)
def test_nothing_but_the_tables_can_be_reached_or_changed(lake: Path, tmp_path: Path, sql: str) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    file = lake / newest_build(lake).files["tasks"][0]
    shutil.copy(file, tmp_path / "other.parquet")
    before = (sorted(tmp_path.iterdir()), file.read_bytes())
    with pytest.raises(BadQuery):
        ask(lake, sql.format(folder=tmp_path, file=file))
    assert (sorted(tmp_path.iterdir()), file.read_bytes()) == before


def test_what_the_caller_has_in_its_variables_is_no_table(lake: Path) -> None:
    private = STORY.rows["tasks"]
    assert private
    with pytest.raises(BadQuery, match="unknown table 'private'"):
        ask(lake, "select * from private")


def test_a_query_that_takes_too_long_is_ended(lake: Path) -> None:
    with pytest.raises(BadQuery, match=r"took longer than 0\.2 s"):
        ask(
            lake,
            "select count(*) from range(10000000000) a, range(1000) b where a.range % 7 = b.range",
            timeout_s=0.2,
        )


def test_all_that_is_asked_has_one_limit_of_time(lake: Path) -> None:
    slow = "select count(*) from range(10000000000) a, range(1000) b where a.range % 7 = b.range"
    with pytest.raises(BadQuery, match=r"(took longer than|the limit of) 0\.2 s"):
        read(lake, lambda tables: tables.rows(slow), timeout_s=0.2)
    with pytest.raises(BadQuery, match="limit of 0 s passed before this query could start"):
        read(lake, lambda tables: tables.rows("select 1"), timeout_s=0.0)


def test_memory_threads_and_the_size_of_an_answer_are_bounded(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ask(lake, "select current_setting('memory_limit'), current_setting('threads')").rows
    assert told == [("953.6 MiB", 2)]
    monkeypatch.setattr(query, "BYTES_MAX", 1_000_000)
    assert len(ask(lake, "select repeat('x', 400) from range(2000)").rows) == 2000
    for large in ("repeat('x', 600)", "[repeat('x', 600)]", "{'a': repeat('x', 600)}"):
        with pytest.raises(BadQuery, match="more than 1,000,000 bytes"):
            ask(lake, f"select {large} from range(2000)")


def test_percentiles_of_one_column_keep_it_once(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of ten million tasks fits into the limit; what does not fit is refused with what to do."""
    monkeypatch.setattr(query, "MEMORY_MAX", "130 MB")
    column, shares = "range::double", (50, 95, 99)
    together = percentiles(column, "p{}", shares)
    each = ", ".join(f"quantile_cont({column}, {share / 100})" for share in shares)
    few, many = "from range(1000)", "from range(4000000)"
    assert ask(lake, f"select {together} {few}").rows == ask(lake, f"select {each} {few}").rows
    assert ask(lake, f"select {together} {many}").columns == ("p50", "p95", "p99")
    assert ask(lake, f"select {percentiles(column, 'p{}', [50], where='range < 3')} {few}").rows == [(1.0,)]
    with pytest.raises(BadQuery, match=r"needs more than 130 MB of memory .*; select less: a shorter time"):
        ask(lake, f"select {each} {many}")


def test_the_newest_build_is_read_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows, number=9)
    publish(tmp_path, {"tasks": STORY.rows["tasks"][:3]}, number=10)
    (tmp_path / "tables/_manifest/.000011.json").write_text("{")
    (tmp_path / "tables/_manifest/notes.txt").write_text("{")
    assert ask(tmp_path, "select count(*) from tasks").rows == [(3,)]


def test_a_build_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows, number=1)
    seen = []

    def work(tables: Tables) -> int:
        seen.append(tables.build.number)
        if len(seen) == 1:
            publish(tmp_path, {"tasks": STORY.rows["tasks"][:5]}, number=2)
            shutil.rmtree(tmp_path / "tables/b1")
        return int(tables.ask("select count(*) from tasks").rows[0][0])

    assert read(tmp_path, work) == 5
    assert seen == [1, 2]


def test_a_file_that_is_gone_for_good_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows)
    next((tmp_path / "tables/b1/tasks").iterdir()).write_bytes(b"torn")
    with pytest.raises(HistoryError, match="umbel history build"):
        ask(tmp_path, "select count(*) from tasks")
    shutil.rmtree(tmp_path / "tables/b1")
    with pytest.raises(HistoryError, match="umbel history build"):
        ask(tmp_path, "select count(*) from tasks")


def test_where_nothing_is_built_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingBuilt, match="umbel history build"):
        newest_build(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ('{"build": "b", "tables": {}, "lake_version": 99}', "upgrade Umbel"),
        ('{"build": "b", "tables": {"tasks": ["../events/x.parquet"]}}', "outside"),
        ('{"build": "b", "tables": {"tasks": ["/other/x.parquet"]}}', "outside"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    folder = tmp_path / "tables/_manifest"
    folder.mkdir(parents=True)
    (folder / "000001.json").write_text(text)
    with pytest.raises(HistoryError, match=problem):
        newest_build(tmp_path)


def test_a_table_that_an_older_build_did_not_have_is_empty(tmp_path: Path) -> None:
    publish(tmp_path, STORY.rows)
    manifest = tmp_path / "tables/_manifest/000001.json"
    manifest.write_text('{"build": "b1", "tables": {}}')
    assert ask(tmp_path, "select * from elections").columns == TABLES["elections"].names


def test_texts_that_a_spreadsheet_would_run_are_marked(lake: Path) -> None:
    answer = ask(lake, """select '=1+1' as "=a", '@x' as b, -5 as c, 'plain' as d, null as e""")
    assert as_csv(for_spreadsheets(answer)) == "'=a,b,c,d,e\n'=1+1,'@x,-5,plain,\n"
    assert as_csv(answer).startswith("=a,")  # for machines, as it is
