"""Every run ends with a collection of garbage: what was there before is left out of it, from here on.

What else a run changes in this process is set back: other tests follow, some of which look at traces.
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
