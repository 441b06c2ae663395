"""The API keeps to its own description: schemathesis asks it what the OpenAPI document allows."""

import os
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks as known_checks  # noqa: F401 (registers them)

from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.web.roles import Role

EXAMPLES = 200 if os.environ.get("UMBEL_SOAK") else 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("openapi")
    with serving(App("described", broker=f"sqlite:///{home / 'queue.db'}"), home / "web.db") as found:
        yield found


def test_the_document_describes_every_endpoint(served: Served) -> None:
    with served.client(served.token(Role.VIEWER)) as client:
        document = client.get("/api/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert {"/api/v1/nodes", "/api/v1/tasks/{task_id}/timeline", "/api/v1/actions", "/api/v1/stream"} <= document[
        "paths"
    ].keys()
    action = document["paths"]["/api/v1/actions"]["post"]["requestBody"]["content"]["application/json"]
    assert len(action["schema"]["anyOf"]) == 20
    assert document["components"]["schemas"]["Problem"]["required"] == ["title", "status"]


def test_what_the_document_allows_is_answered_as_it_says(served: Served) -> None:
    headers = {"authorization": f"Bearer {served.token(Role.ADMIN)}"}
    document = httpx.get(f"{served.url}/api/openapi.json", headers=headers).json()
    del document["paths"]["/api/v1/stream"]  # it does not end
    schema = schemathesis.openapi.from_dict(document)
    schema.config.base_url = served.url
    relaxed = settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @relaxed
        @schemathesis.hypothesis_given(operation) if False else operation.as_strategy_given  # type: ignore
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(headers=headers)

        ask()
