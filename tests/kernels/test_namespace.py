"""`kernels` stays a namespace package: transformers probes a project of that name and breaks on a regular
one.
"""

from __future__ import annotations

import importlib.util


def test_kernels_has_no_init_file() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert spec.origin is None
    assert spec.loader is None or "Namespace" in type(spec.loader).__name__
