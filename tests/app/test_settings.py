import re
from pathlib import Path
from typing import Any

import pytest

import umbel
from umbel import App
from umbel.app.settings import Settings, assemble, override
from umbel.errors import BadSetting, ConfigurationError, UnknownSetting


def write_table(directory: Path, *lines: str) -> Path:
    file = directory / "pyproject.toml"
    file.write_text("\n".join(["[tool.umbel]", *lines, ""]))
    return file


# -- precedence: defaults < pyproject.toml < constructor < variables < flags -----------------------


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    made = assemble({}, directory=tmp_path)
    assert made.task_default_queue == "celery"
    assert made.task_acks_late is True
    assert made.accept_content == ("json",)


def test_the_project_file_beats_the_default(tmp_path: Path) -> None:
    write_table(tmp_path, 'task_default_queue = "from-file"')
    assert assemble({}, directory=tmp_path).task_default_queue == "from-file"


def test_the_constructor_beats_the_project_file(tmp_path: Path) -> None:
    write_table(tmp_path, 'task_default_queue = "from-file"', "lease_s = 3.0")
    made = assemble({"task_default_queue": "from-code"}, directory=tmp_path)
    assert (made.task_default_queue, made.lease_s) == ("from-code", 3.0)


def test_a_variable_beats_the_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, 'task_default_queue = "from-file"')
    monkeypatch.setenv("UMBEL_TASK_DEFAULT_QUEUE", "from-operator")
    made = assemble({"task_default_queue": "from-code"}, directory=tmp_path)
    assert made.task_default_queue == "from-operator"


def test_a_flag_beats_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_WORKER_CONCURRENCY", "4")
    assert override(assemble({}, directory=tmp_path), worker_concurrency=2).worker_concurrency == 2


def test_a_flag_that_was_not_given_changes_nothing(tmp_path: Path) -> None:
    made = assemble({"worker_concurrency": 4}, directory=tmp_path)
    assert override(made, worker_concurrency=None, worker_grace_s=None) == made


def test_none_in_the_constructor_means_not_given(tmp_path: Path) -> None:
    write_table(tmp_path, "worker_concurrency = 7")
    assert assemble({"worker_concurrency": None}, directory=tmp_path).worker_concurrency == 7


def test_the_nearest_project_file_upwards_counts(tmp_path: Path) -> None:
    write_table(tmp_path, 'task_default_queue = "outer"')
    inner = tmp_path / "service" / "src"
    inner.mkdir(parents=True)
    write_table(inner.parent, 'task_default_queue = "inner"')
    assert assemble({}, directory=inner).task_default_queue == "inner"


def test_variables_that_say_where_to_look_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UMBEL_APP", "UMBEL_RUN_DIR", "UMBEL_SOAK"):
        monkeypatch.setenv(name, "1")
    assert assemble({}, directory=tmp_path).task_default_queue == "celery"


# -- refusals --------------------------------------------------------------------------------------


def test_an_unknown_setting_of_the_constructor_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"'task_default_qeue' in App\(\.\.\.\).*'task_default_queue'"):
        assemble({"task_default_qeue": "x"}, directory=tmp_path)


def test_an_unknown_setting_of_the_file_is_refused_with_the_file_and_the_nearest(tmp_path: Path) -> None:
    file = write_table(tmp_path, "leases = 3.0")
    with pytest.raises(UnknownSetting) as caught:
        assemble({}, directory=tmp_path)
    assert "'leases'" in str(caught.value)
    assert str(file) in str(caught.value)
    assert "did you mean 'lease_s'?" in str(caught.value)


def test_an_unknown_variable_is_refused_with_its_name_and_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_WORKER_CONCURENCY", "2")
    with pytest.raises(UnknownSetting, match=r"UMBEL_WORKER_CONCURENCY.*'worker_concurrency'"):
        assemble({}, directory=tmp_path)


def test_an_unknown_flag_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"the command line.*'worker_pool'"):
        override(assemble({}, directory=tmp_path), worker_pol="solo")


def test_a_name_like_no_other_is_refused_without_a_guess(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting) as caught:
        assemble({"zzz": 1}, directory=tmp_path)
    assert str(caught.value) == "unknown setting 'zzz' in App(...)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_s", "ten"),
        ("task_acks_late", 1),
        ("worker_concurrency", 2.5),
        ("worker_concurrency", True),
        ("task_serializer", "yaml"),
        ("accept_content", "json"),
        ("task_routes", {"a": 3}),
        ("broker", 5),
    ],
)
def test_an_ill_typed_setting_is_refused_with_its_value(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(BadSetting) as caught:
        assemble({name: value}, directory=tmp_path)
    assert f"setting {name!r} in App(...) is {value!r}" in str(caught.value)


def test_an_ill_typed_value_in_the_file_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path, 'lease_s = "3"')
    with pytest.raises(BadSetting, match=r"'lease_s' in .*pyproject.toml is '3'"):
        assemble({}, directory=tmp_path)


def test_an_ill_typed_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_LEASE_S", "soon")
    with pytest.raises(BadSetting, match=r"'lease_s' in the environment \(UMBEL_LEASE_S\) is 'soon'"):
        assemble({}, directory=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_concurrency", 0),
        ("task_max_deliveries", 0),
        ("lease_s", 0.01),
        ("lease_s", float("nan")),
        ("message_max_bytes", 10),
        ("task_time_limit_s", -1.0),
        ("worker_grace_s", -0.5),
        ("revokes_max", 0),
        ("revoke_retention_s", 0.0),  # it would take an earlier revoke back
    ],
)
def test_a_setting_below_its_minimum_is_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(BadSetting, match=f"{name!r}.*must be at least"):
        assemble({name: value}, directory=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("revokes_max", 5_000_001), ("revoke_retention_s", float("inf")), ("failed_keep", 100_001)],
)
def test_a_setting_above_its_maximum_is_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(BadSetting, match=f"{name!r}.*must be at most"):
        assemble({name: value}, directory=tmp_path)


@pytest.mark.parametrize("priority", [-1, 10])
def test_a_default_priority_that_does_not_exist_is_refused(tmp_path: Path, priority: int) -> None:
    with pytest.raises(BadSetting, match="task_default_priority"):
        assemble({"task_default_priority": priority}, directory=tmp_path)


def test_a_flag_below_its_minimum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="'worker_concurrency' in the command line is 0"):
        override(assemble({}, directory=tmp_path), worker_concurrency=0)


def test_a_project_file_that_is_no_toml_is_refused_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.umbel\n")
    with pytest.raises(ConfigurationError, match=f"cannot read the settings in {file}"):
        assemble({}, directory=tmp_path)


@pytest.mark.parametrize("text", ["[tool]\numbel = 3\n", "tool = 'hammer'\n"])
def test_a_project_file_whose_umbel_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml.*must be a table"):
        assemble({}, directory=tmp_path)


# -- where the embedded file lies ------------------------------------------------------------------


def test_the_embedded_file_lies_beside_the_project_file_wherever_one_calls_from(tmp_path: Path) -> None:
    write_table(tmp_path)
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    made = assemble({}, directory=below)
    assert made.broker == made.backend == f"sqlite:///{tmp_path}/umbel.db"


def test_a_relative_file_is_anchored_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, 'broker = "sqlite:///var/queue.db"')
    monkeypatch.setenv("UMBEL_BACKEND", "sqlite:///results.db")
    (tmp_path / "src").mkdir()
    made = assemble({}, directory=tmp_path / "src")
    assert made.broker == f"sqlite:///{tmp_path}/var/queue.db"
    assert made.backend == f"sqlite:///{tmp_path}/results.db"


def test_an_absolute_file_stays_where_it_is(tmp_path: Path) -> None:
    assert (
        assemble({"broker": "sqlite:////var/lib/q.db"}, directory=tmp_path).broker
        == "sqlite:////var/lib/q.db"
    )


def test_without_a_project_the_embedded_file_lies_in_the_directory(tmp_path: Path) -> None:
    assert assemble({}, directory=tmp_path).broker == f"sqlite:///{tmp_path}/umbel.db"


def test_results_live_where_the_broker_is_unless_told_otherwise(tmp_path: Path) -> None:
    made = assemble({"broker": "sqlite:///q.db"}, directory=tmp_path)
    assert made.backend == made.broker


# -- values from variables -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["json,msgpack", " json , msgpack ", '["json", "msgpack"]'])
def test_a_list_is_written_in_a_variable_with_commas_or_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("UMBEL_ACCEPT_CONTENT", text)
    assert assemble({}, directory=tmp_path).accept_content == ("json", "msgpack")


def test_a_table_is_written_in_a_variable_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_TASK_ROUTES", '{"a.*": "slow", "b": {"queue": "q", "priority": 3}}')
    routes = assemble({}, directory=tmp_path).task_routes
    assert routes == {"a.*": "slow", "b": {"queue": "q", "priority": 3}}


@pytest.mark.parametrize("name", ["UMBEL_TASK_ROUTES", "UMBEL_WORKER_QUEUES"])
def test_a_variable_that_is_broken_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "[1, ")
    with pytest.raises(BadSetting, match=f"{name}.*not JSON"):
        assemble({}, directory=tmp_path)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_a_switch_is_written_in_a_variable_as_a_word_or_a_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    monkeypatch.setenv("UMBEL_TASK_ACKS_LATE", text)
    assert assemble({}, directory=tmp_path).task_acks_late is value


def test_numbers_come_out_of_variables_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_LEASE_S", "2.5")
    monkeypatch.setenv("UMBEL_TASK_MAX_DELIVERIES", "5")
    made = assemble({}, directory=tmp_path)
    assert (made.lease_s, made.task_max_deliveries) == (2.5, 5)


# -- in the app ------------------------------------------------------------------------------------


def test_an_apps_file_lies_in_its_directory_wherever_one_calls_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for directory in (tmp_path, str(tmp_path), ".."):
        made = App("shop", broker="sqlite:///q.db", directory=directory, task_default_queue="orders").settings
        assert (made.broker, made.task_default_queue) == (f"sqlite:///{tmp_path}/q.db", "orders")


def test_the_project_file_is_looked_for_from_an_apps_directory_upwards(tmp_path: Path) -> None:
    write_table(tmp_path, 'task_default_queue = "orders"')
    (tmp_path / "src").mkdir()
    made = App("shop", directory=tmp_path / "src").settings
    assert (made.broker, made.task_default_queue) == (f"sqlite:///{tmp_path}/umbel.db", "orders")


def test_the_file_of_an_app_without_a_directory_lies_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert App("shop").settings.broker == f"sqlite:///{tmp_path}/umbel.db"


def test_a_directory_that_is_none_is_refused_with_what_to_write(tmp_path: Path) -> None:
    for wrong in (__file__, tmp_path / "missing"):
        with pytest.raises(
            ConfigurationError, match=r"not a directory; to .* write directory=Path\(__file__\)"
        ):
            App("shop", directory=wrong)


def test_a_current_directory_that_was_removed_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="the current directory was removed"):
        App("shop")
    assert App("shop", directory=tmp_path).settings.broker == f"sqlite:///{tmp_path}/umbel.db"


def test_an_app_refuses_what_its_settings_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownSetting, match=r"'brocker'.*'broker'"):
        App("shop", brocker="sqlite:///q.db")


def test_making_an_app_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    App("shop")
    assert list(tmp_path.iterdir()) == []


def test_what_a_broker_is_handed_comes_from_the_settings() -> None:
    handed = Settings(broker="sqlite:////q.db", lease_s=3.0, event_log_max=7).for_broker()
    assert (handed.url, handed.lease_s, handed.event_log_max) == ("sqlite:////q.db", 3.0, 7)


# -- what is printed -------------------------------------------------------------------------------


def test_settings_are_printed_without_passwords(tmp_path: Path) -> None:
    broker = "redis://shop:hunter2@one/0;redis://shop:hunter2@two/0"
    app = App("shop", broker=broker, backend="redis://:hunter2@one/1", task_default_queue="mine")
    for shown in (
        repr(app.settings),
        str(app.settings),
        f"{app.settings!r}",
        repr(app.settings.for_broker()),
    ):
        assert "hunter2" not in shown
    assert "redis://shop:***@two/0" in repr(app.settings)
    assert "task_default_queue='mine'" in repr(app.settings)
    assert app.settings.for_broker().url == broker


@pytest.mark.parametrize("mode", ["0600", "rwx", "1777", "", "0999"])
def test_a_lake_that_its_owner_cannot_use_is_refused(mode: str) -> None:
    with pytest.raises(BadSetting, match="must be an octal mode"):
        App("shop", lake_mode=mode)


@pytest.mark.parametrize(
    "lake",
    [
        *("gs://key:hunter2@bucket/x", "abfss://c@account/x", "hdfs://n/x", "file://other/x", "file://"),
        *("s3://", "s3:///x", "s3://bucket", "s3://bucket/", "s3://Bucket/x", "s3://bucket/a//b", "s3://b/x"),
        *("s3://bucket/../x", "s3://bucket/x?region=eu", "s3a://bucket/x"),
    ],
)
def test_a_lake_that_is_neither_a_folder_nor_in_s3_is_refused(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSetting, match="give the path of a folder") as raised:
        App("shop", history_lake=lake)
    assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("UMBEL_HISTORY_LAKE", lake)
    with pytest.raises(BadSetting, match=r"UMBEL_HISTORY_LAKE.*give the path of a folder"):
        App("shop")


def test_a_lake_in_s3_is_named_without_credentials() -> None:
    with pytest.raises(BadSetting, match="takes no credentials; set AWS_ACCESS_KEY_ID") as raised:
        App("shop", history_lake="s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(raised.value)
    assert App("shop", history_lake="S3://bucket/a/b/").settings.history_lake == "s3://bucket/a/b"


def test_a_lake_may_be_a_file_address() -> None:
    assert App("shop", history_lake="file:///srv/a%20lake").settings.history_lake == "/srv/a lake"
    assert App("shop", history_lake="s3:/x").settings.history_lake == "s3:/x", "a folder, by its look"


@pytest.mark.parametrize("keys", [["k:too short"], "k:secret that is long enough", [7]])
def test_no_error_shows_a_signing_key(keys: object) -> None:
    with pytest.raises(BadSetting) as raised:
        assemble({"signing_keys": keys})
    assert "'***'" in str(raised.value)
    assert "short" not in str(raised.value)


def test_keys_come_from_a_variable_and_are_shown_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_SIGNING_KEYS", "new:0123456789abcdef, old:fedcba9876543210")
    settings = assemble({"broker": "redis://me:password@host/0"})
    assert settings.keyring is not None
    assert settings.keyring.ids == ("new", "old")
    assert settings.shown()["signing_keys"] == ["new:***", "old:***"]
    for secret in ("0123456789abcdef", "fedcba9876543210", "password"):
        assert secret not in repr(settings)
        assert secret not in repr(settings.for_broker().keyring)


def test_a_window_longer_than_brokers_remember_is_refused() -> None:
    with pytest.raises(BadSetting, match="at most"):
        assemble({"signing_window_s": 8 * 86_400})


def test_advice_to_change_a_setting_names_one_that_exists() -> None:
    # A text, not a statement: what stands before the verb is a word or a quote.
    advice = re.compile(r'(?:[\w,;] |")(?:raise|lower|shorten|increase|settings?) `?([a-z]+(?:_[a-z0-9]+)+)')
    source = Path(umbel.__file__).parent
    advised = {name for file in source.rglob("*.py") for name in advice.findall(file.read_text())}
    assert "revokes_max" in advised
    of_others = {"consumer_timeout", "beat_scheduler", "umbel_app"}  # RabbitMQ's, Celery's, pytest's
    assert advised - of_others <= set(Settings.__struct_fields__)
