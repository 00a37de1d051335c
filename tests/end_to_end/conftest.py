"""The small system of the modules that ask it in many ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end import tiny_model
from tests.end_to_end.tiny_system import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of the oracle would spin on the cores of the system
    with serving(tiny_model.write(tmp_path_factory.mktemp("tiny")), "shared_memory") as system:
        yield system
    torch.set_num_threads(before)
