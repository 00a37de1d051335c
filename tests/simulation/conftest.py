"""Every run ends with a collection of garbage: what was there before is left out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.simulation.campaign import prepare


@pytest.fixture(scope="package", autouse=True)
def prepared() -> Iterator[None]:
    prepare()
    yield
    gc.unfreeze()
