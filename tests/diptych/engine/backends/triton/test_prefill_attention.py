"""Choice of prefill attention by the environment: what is asked for is taken, or refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.triton.prefill_attention import VARIABLE, chosen_operators
from diptych.engine.models.shape import UnsupportedModel
from kernels.gpu import flash_prefill as module
from kernels.gpu.flash_prefill import flash_prefill
from kernels.gpu.paged_prefill import paged_prefill


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: "own"}])
def test_our_own_kernel_is_the_default(environment: dict[str, str]) -> None:
    assert chosen_operators(environment).paged_prefill is paged_prefill


def test_the_library_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lacks_flash", lambda: None)
    assert chosen_operators({VARIABLE: "flash"}).paged_prefill is flash_prefill


def test_what_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package_of_attention")
    with pytest.raises(UnsupportedModel, match="DIPTYCH_PREFILL_ATTENTION=flash: no FlashAttention-3 here"):
        chosen_operators({VARIABLE: "flash"})
    with pytest.raises(UnsupportedModel, match="'faster': it must be own or flash"):
        chosen_operators({VARIABLE: "faster"})
