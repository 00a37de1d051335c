"""All that is sent from outside, good and bad, goes to the tiny system, which must be whole at the end."""

from __future__ import annotations

import pytest

from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import Served


@pytest.fixture(scope="module")
def stack(served: Served) -> Stack:
    return served.stack
