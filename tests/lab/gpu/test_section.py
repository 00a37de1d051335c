"""Figures know whether they meet their targets; sections say plainly that there is no GPU."""

from __future__ import annotations

import pytest
import torch

from lab.gpu.ceilings import ceilings
from lab.gpu.section import Context, Unmeasured, figure


def test_a_target_bounds_the_ratio_where_there_is_one() -> None:
    assert figure("s", "n", 3.0, "TB/s", against="copy", ratio=0.9, at_least=0.85).met is True
    assert figure("s", "n", 3.0, "TB/s", against="copy", ratio=0.8, at_least=0.85).met is False
    assert figure("s", "n", 3.0, "ms", at_most=3.0).met is True
    assert figure("s", "n", 3.1, "ms", at_most=3.0).met is False
    assert figure("s", "n", 3.1, "ms").met is None


def test_what_was_not_measured_is_said() -> None:
    context = Context(torch.device("cpu"), quick=True, say=lambda _: None, measured={"a": 2.0})
    assert context.needs("a") == 2.0
    with pytest.raises(Unmeasured, match="b was not measured"):
        context.needs("b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_a_section_says_so() -> None:
    context = Context(torch.device("cuda"), quick=True, say=lambda _: None)
    with pytest.raises(Unmeasured, match="no CUDA device"):
        list(ceilings(context))
