"""The runner of real clients, with the one client that needs no environment of its own."""

from __future__ import annotations

from tests.clients.__main__ import run_client
from tests.clients.clients import CLIENTS
from tests.clients.results import FAILED, OK
from tests.clients.systems import Systems
from tests.end_to_end.stack import Stack, http_root


def test_openai_python_fails_on_no_path(bundled: Stack) -> None:
    root = http_root(bundled)
    found = run_client(CLIENTS["openai-python"], Systems(root, root, bundled.address), 240)
    outcomes = {one.path: one.result for one in found.results}
    assert FAILED not in outcomes.values(), found.results
    assert {path for path, result in outcomes.items() if result == OK} >= {
        "plain",
        "streamed",
        "structured",
        "overflow",
        "cancel",
    }
