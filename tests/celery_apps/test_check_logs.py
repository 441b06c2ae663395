"""A Celery project's logging means in Umbel's main process what it means in Celery's."""

from pathlib import Path

import pytest

from tests.celery_apps.programs import home


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place: Path = tmp_path_factory.mktemp("logs")
    found: dict[str, str] = home(place).data("tests.celery_apps.logging_program")
    return found


def test_the_root_logger_is_celerys_and_our_fields_stand_behind_the_text(logged: dict[str, str]) -> None:
    assert logged["hijacked"].splitlines() == [
        "CELERY INFO worker started queue='a b'",
        "CELERY INFO of the project",
        "CELERY WARNING printed",
    ]


def test_handlers_of_the_project_stay_unless_they_are_hijacked(logged: dict[str, str]) -> None:
    assert logged["not hijacked"].splitlines() == [
        "OWN worker started queue='a b'",
        "OWN of the project",
        "OWN printed",
    ]


def test_what_is_printed_is_not_logged_if_the_settings_say_so(logged: dict[str, str]) -> None:
    assert "printed" not in logged["not redirected"]


def test_json_is_asked_for_on_the_command_line(logged: dict[str, str]) -> None:
    first = logged["json"].splitlines()[0]
    assert '"message":"worker started","queue":"a b"' in first


def test_a_receiver_of_setup_logging_does_all_of_it(logged: dict[str, str]) -> None:
    assert logged["by the signal"].splitlines() == ["OWN worker started", "OWN of the project"]
