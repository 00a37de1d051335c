"""One system for all that is sent from outside, good and bad: it must be whole at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.public_api import tiny_tools
from tests.end_to_end.stack import Stack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tiny_tools.write(tmp_path_factory.mktemp("public"))
    with tiny_tools.serving(folder, "--kv-blocks", "96") as stack:
        before = stack.pids()
        yield stack
        assert stack.pids() == before  # whatever was sent, no process ended
