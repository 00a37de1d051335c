"""Shared fixtures: the bundled model as the gateway loads it, and a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.model.served_model import ServedModel
from tests.diptych.runtime.tokenizer.bundled import bundled_path, oracle
from tests.gateway.running_gateway import valkey

__all__ = ["bundled_path", "oracle"]


@pytest.fixture(scope="session")
def bundled(bundled_path: Path) -> ServedModel:
    return ServedModel.load(bundled_path)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Yield the URL of the directory that the gateways and workers of one test file share."""
    with valkey() as url:
        yield url
