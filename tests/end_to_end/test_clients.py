"""The runner of real clients, with the one client that needs no environment of its own."""

from __future__ import annotations

from tests.clients.__main__ import run_client
from tests.clients.clients import CLIENTS
from tests.clients.results import OK, PATHS
from tests.clients.systems import Systems
from tests.end_to_end.stack import Stack, http_root


def test_openai_python_fails_on_no_path(bundled: Stack) -> None:
    root = http_root(bundled)
    found = run_client(CLIENTS["openai-python"], Systems(root, root, bundled.address), 240)
    assert {one.path: one.result for one in found.results} == dict.fromkeys(PATHS, OK), found.results
