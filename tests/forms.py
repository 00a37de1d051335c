"""The short form of a suite, which every run tries, and the full form, which `make test-full` tries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FULL = pytest.mark.full


def sampled(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Return a test's parameters: cases of the sample for both forms, the others for the full form alone.

    A tuple is one case of several parameters. Raises ValueError where the sample has what is no case.
    """
    cases = list(cases)
    if unknown := [case for case in sample if case not in cases]:
        raise ValueError(f"sample: {unknown} are no cases")
    return [
        case if case in sample else pytest.param(*case if isinstance(case, tuple) else (case,), marks=FULL)
        for case in cases
    ]
