"""The door over a gateway in this process, with scripted workers behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import bundled, bundled_path
from tests.gateway.running_gateway import valkey

__all__ = ["bundled", "bundled_path", "redis_url"]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey() as url:
        yield url
