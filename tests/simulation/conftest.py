"""Preparation of the simulation's tests: objects that exist before are excluded from garbage collection.

Other changes to the process are undone: other tests follow, some of which read traces.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulation.campaign import prepare


@pytest.fixture(scope="package", autouse=True)
def prepared() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SDK_DISABLED", "true")
        prepare()
        yield
    torch.set_num_threads(threads)
