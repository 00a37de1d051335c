"""The directory that the gateways of these tests share; the model comes from the folder above."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.running_gateway import valkey


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey() as url:
        yield url
