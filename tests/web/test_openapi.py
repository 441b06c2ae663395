"""The API keeps to its own description: schemathesis asks it what the OpenAPI document allows."""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.web.settings import Role

EXAMPLES = 200 if os.environ.get("UMBEL_SOAK") else 1
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("openapi")
    with serving(App("described", broker=f"sqlite:///{home / 'queue.db'}"), home / "web.db") as found:
        yield found


def test_the_document_describes_every_endpoint(served: Served) -> None:
    with served.client(served.token(Role.VIEWER)) as client:
        document = client.get("/api/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert {
        "/api/v1/nodes",
        "/api/v1/tasks/{task_id}/timeline",
        "/api/v1/actions",
        "/api/v1/history/happenings",
        "/api/v1/views",
        "/api/v1/stream",
    } <= document["paths"].keys()
    action = document["paths"]["/api/v1/actions"]["post"]["requestBody"]["content"]["application/json"]
    assert len(action["schema"]["anyOf"]) == 26
    assert document["components"]["schemas"]["Problem"]["required"] == ["title", "status"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_is_asked_is_answered_as_the_document_says(served: Served, mode: GenerationMode) -> None:
    """Also what the document does not allow: with a problem, never with a fault."""
    headers = {"authorization": f"Bearer {served.token(Role.ADMIN)}"}
    document = httpx.get(f"{served.url}/api/openapi.json", headers=headers).json()
    del document["paths"]["/api/v1/stream"]  # it does not end
    schema = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]  # its own document is no invalid one
        if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body):
            continue  # nothing can be wrong

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(base_url=served.url, headers=headers, checks=CHECKS)

        ask()
