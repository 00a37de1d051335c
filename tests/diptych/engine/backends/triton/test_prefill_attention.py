"""Choice of prefill attention by the environment: what is asked for is taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.prefill_attention import DECODE_VARIABLE, VARIABLE, chosen_operators
from diptych.engine.models.shape import UnsupportedModel
from kernels.gpu import flash_prefill as module
from kernels.gpu import fp8_prefill as fp8
from kernels.gpu.flash_prefill import flash_prefill
from kernels.gpu.fp8_prefill import fp8_prefill
from kernels.gpu.invariant_attention import invariant_prefill
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.paged_prefill import paged_prefill
from tests.kernels.cpu.tiny_models import shape_of


def choose(name: str | None, head_dim: int = 64, device: str = "cpu", **how: Any) -> Operators:
    environment = {} if name is None else {VARIABLE: name}
    shape = shape_of(head_dim=head_dim)
    return chosen_operators(shape, torch.device(device), environment=environment, **how)


@pytest.mark.parametrize("name", [None, "", "own"])
@pytest.mark.parametrize("fp8_cache", [False, True])
def test_our_own_kernel_is_the_default(name: str | None, fp8_cache: bool) -> None:
    assert choose(name, fp8_cache=fp8_cache).paged_prefill is paged_prefill


def test_the_library_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lacks_flash", lambda: None)
    assert choose("flash").paged_prefill is flash_prefill


def test_products_of_fp8_are_taken_over_a_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("fp8", fp8_cache=True).paged_prefill is fp8_prefill
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose("fp8", device="cuda", fp8_cache=True).paged_prefill is fp8_prefill


def test_what_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package_of_attention")
    with pytest.raises(UnsupportedModel, match="DIPTYCH_PREFILL_ATTENTION=flash: no FlashAttention-3 here"):
        choose("flash")
    with pytest.raises(UnsupportedModel, match="'faster': it must be own, flash or fp8"):
        choose("faster")
    with pytest.raises(UnsupportedModel, match="=fp8: it goes with --kv-cache-dtype fp8"):
        choose("fp8")
    with pytest.raises(UnsupportedModel, match="=fp8: heads of 72: multiples of 16"):
        choose("fp8", head_dim=72, fp8_cache=True)
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UnsupportedModel, match=r"=fp8: compute capability 8\.0"):
        choose("fp8", device="cuda", fp8_cache=True)


def decode(name: str, capability: tuple[int, int] | None = None, **how: Any) -> Any:
    device = torch.device("cpu" if capability is None else "cuda")
    found = chosen_operators(shape_of(head_dim=64), device, environment={DECODE_VARIABLE: name}, **how)
    return found.paged_decode


def test_decode_rows_are_multiplied_in_fp8_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode("own", fp8_cache=True) is paged_decode
    chosen = decode("fp8", fp8_cache=True)
    assert (chosen.func, chosen.keywords) == (paged_decode, {"eight": True})
    assert decode("apart").keywords == {"apart": True}
    with pytest.raises(UnsupportedModel, match="ATTENTION is 'flash': it must be own, apart or fp8"):
        decode("flash")
    with pytest.raises(UnsupportedModel, match="DECODE_ATTENTION=fp8: it goes with --kv-cache-dtype fp8"):
        decode("fp8")
    with pytest.raises(UnsupportedModel, match="--batch-invariant: DIPTYCH_DECODE_ATTENTION=fp8"):
        decode("fp8", fp8_cache=True, batch_invariant=True)
    for capability, why in (((9, 0), "sixteen rows are multiplied in 16 bits"), ((8, 0), "begin with 8.9")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(UnsupportedModel, match=why):
            decode("fp8", capability, fp8_cache=True)


def test_the_batch_invariant_step_refuses_every_other_attention() -> None:
    assert choose(None, batch_invariant=True).paged_prefill is invariant_prefill
    with pytest.raises(UnsupportedModel, match="--batch-invariant: DIPTYCH_PREFILL_ATTENTION=fp8"):
        choose("fp8", fp8_cache=True, batch_invariant=True)
    with pytest.raises(UnsupportedModel, match="--batch-invariant"):
        choose("flash", batch_invariant=True)
