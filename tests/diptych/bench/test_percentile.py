import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.percentile import percentile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_is_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))
