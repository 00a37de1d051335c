"""Packed weights in a file that other processes map: the same bits, and whole files only."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.shared_weights import EmptyFile, MappedWeights, from_store
from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.loaded_model import load_model
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from diptych.engine.weights import Weights
from diptych.engine.weights.reader import OpenCheckpoint
from kernels.kquants import KQuantFormat
from kernels.quantised_linear import BlockFormat, GroupFormat, dequantise
from tests import bundled_oracle
from tests.kernels.cpu import tiny_models
from tests.kernels.cpu.test_kquant_products import SHAPE, as_q4_k_m, matrix_in
from tests.kernels.cpu.tiny_models import shape_of, tokens_of, weights_of

MOST = 1 << 26
FORMATS: tuple[BlockFormat, ...] = (*get_args(GroupFormat), *get_args(KQuantFormat))
EXPERTS = ExpertsShape(num_experts=4, experts_per_token=2, intermediate_size=72)


def empty_file() -> int:
    return os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def tied(name: BlockFormat) -> Weights:
    """Return random weights whose embedding is their head's numbers, as a tied GGUF file has them."""
    dense = weights_of(SHAPE, torch.float32)
    weights = tiny_models.block_weights_of(SHAPE, "q4_0")
    head = matrix_in(name, SHAPE.vocab_size, SHAPE.hidden_size, 3)
    return replace(weights, embed=dequantise(head).bfloat16(), head=head, final_norm=dense.final_norm)


WITH_EXPERTS = shape_of(
    layers=tuple(replace(one, experts=True) for one in shape_of().layers), experts=EXPERTS
)
RECURRENT = shape_of(
    layers=(
        LayerShape(recurrent=ShortConvShape(100, 3, bias=True)),
        LayerShape(attention=False, recurrent=ShortConvShape(100, 4), feed_forward=False),
    )
)
TIED = shape_of(tied_embeddings=True, qkv_bias=True, mlp_bias=True, sinks=True)
MODELS: dict[str, tuple[ModelShape, Weights, torch.dtype]] = {
    "fp32": (shape_of(), weights_of(shape_of(), torch.float32), torch.float32),
    "bf16, tied": (TIED, weights_of(TIED, torch.bfloat16), torch.bfloat16),
    "experts": (WITH_EXPERTS, weights_of(WITH_EXPERTS, torch.float32), torch.float32),
    "recurrent": (RECURRENT, weights_of(RECURRENT, torch.float32), torch.float32),
    "K-quants": (SHAPE, as_q4_k_m(), torch.bfloat16),
    "K-quants, tied": (SHAPE, tied("q6_k"), torch.bfloat16),
    "bytes in codes": (shape_of(), tiny_models.coded_weights_of(shape_of(), "q4_1"), torch.bfloat16),
}


def logits(backend: NativeBackend, shape: ModelShape, dtype: torch.dtype) -> torch.Tensor:
    layout = kv_layout(shape, dtype, 16)
    memory = KVMemory(layout, own_blocks(layout, 40))
    table, pages = own_tables(layout, range(memory.num_blocks))
    first = SequenceStep(memory, table, 0, tokens_of(19), True, window_tables=pages)
    backend.forward([first], None)
    return backend.forward([replace(first, start=19, token_ids=tokens_of(2))], None)


@pytest.mark.parametrize("name", MODELS)
def test_a_mapped_model_computes_the_same_bits(name: str) -> None:
    shape, weights, dtype = MODELS[name]
    expected = logits(NativeBackend(shape, weights, dtype), shape, dtype)
    file = empty_file()
    packer = NativeBackend(shape, weights, dtype, packed=EmptyFile(file, MOST))
    mapped = NativeBackend(shape, MappedWeights(file, weights.storage), dtype)
    os.close(file)
    assert torch.equal(logits(packer, shape, dtype), expected)
    del packer  # what the others map does not go with it
    assert torch.equal(logits(mapped, shape, dtype), expected)


def test_another_models_file_is_another_model() -> None:
    """The control: the logits are those of the file, not of anything that the process had before."""
    shape, weights, dtype = MODELS["fp32"]
    file = empty_file()
    NativeBackend(shape, weights_of(shape, dtype, seed=6), dtype, packed=EmptyFile(file, MOST))
    mapped = NativeBackend(shape, MappedWeights(file, "dense"), dtype)
    os.close(file)
    assert not torch.equal(
        logits(mapped, shape, dtype), logits(NativeBackend(shape, weights, dtype), shape, dtype)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding_is_read_out_of_the_head(name: BlockFormat) -> None:
    weights = tied(name)
    backend = NativeBackend(SHAPE, weights, torch.bfloat16)
    assert backend.embeds_from_head
    assert torch.equal(backend.embedding_rows(list(range(SHAPE.vocab_size))), weights.embed.float())


def test_an_embedding_of_its_own_is_kept() -> None:
    """The control: one bit of one row, and the head is not read for it."""
    weights = tied("q6_k")
    embed = weights.embed.clone()
    embed.view(torch.int16)[-1, -1] ^= 1
    backend = NativeBackend(SHAPE, replace(weights, embed=embed), torch.bfloat16)
    assert not backend.embeds_from_head
    assert torch.equal(backend.embedding_rows(list(range(SHAPE.vocab_size))), embed.float())


def test_a_file_of_another_shape_or_half_a_file_is_refused() -> None:
    shape, weights, dtype = MODELS["fp32"]
    file = empty_file()
    NativeBackend(shape, weights, dtype, packed=EmptyFile(file, MOST))
    with pytest.raises(NativeError, match="another shape"):
        NativeBackend(replace(shape, rms_eps=1e-6), MappedWeights(file, "dense"), dtype)
    os.truncate(file, 4096)
    with pytest.raises(NativeError, match="another version"):
        NativeBackend(shape, MappedWeights(file, "dense"), dtype)
    os.truncate(file, 0)
    with pytest.raises(NativeError, match="cut short"):
        NativeBackend(shape, MappedWeights(file, "dense"), dtype)
    os.close(file)


class OneProcess:
    """A store as several workers of a host see it."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.given_up: list[str] = []

    def obtain(self, key: str) -> int | None:
        return os.dup(self.files[key]) if key in self.files else None

    def publish(self, key: str, file: int) -> None:
        self.files[key] = os.dup(file)

    def give_up(self, key: str) -> None:
        self.given_up.append(key)


def test_a_second_load_reads_no_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bundled_oracle.path().read_bytes())
    store = OneProcess()
    load_model(path, "gguf", backend="native", store=store)
    (file,) = store.files.values()
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    monkeypatch.setattr(OpenCheckpoint, "read_all", _no_tensor)
    load_model(path, "gguf", backend="native", store=store, max_context=64)
    with pytest.raises(TensorRead):
        load_model(path, "bf16", backend="native", store=store)
    os.utime(path, ns=(1, 1))  # as another file of the same size and name
    with pytest.raises(TensorRead):
        load_model(path, "gguf", backend="native", store=store)
    assert len(store.given_up) == 2


class TensorRead(Exception):
    """The files were read."""


def _no_tensor(opened: OpenCheckpoint) -> None:
    raise TensorRead


class NoStore(OneProcess):
    """A store that cannot be reached."""

    def obtain(self, key: str) -> int | None:
        raise OSError("no holder")


class RefusingStore(OneProcess):
    """A store that takes no file."""

    def publish(self, key: str, file: int) -> None:
        raise OSError("no")


def test_without_a_store_a_process_has_its_own_copy() -> None:
    packed: list[EmptyFile | None] = []
    assert (
        from_store(NoStore(), "key", 1, _none_to_take, lambda file: packed.append(file), lambda: True) is None
    )
    assert packed == [None]


def test_what_is_packed_is_used_even_if_no_store_takes_it() -> None:
    store = RefusingStore()
    found = from_store(store, "key", 1, _none_to_take, _packed_size, lambda: True)
    assert found > 0
    assert store.given_up == ["key"]


def test_files_that_changed_while_they_were_read_are_not_published() -> None:
    store = OneProcess()
    from_store(store, "key", 1, _none_to_take, _packed_size, lambda: False)
    assert not store.files
    assert store.given_up == ["key"]


def _none_to_take(file: int) -> int:
    raise AssertionError


def _packed_size(file: EmptyFile | None) -> int:
    assert file is not None
    return file.most_bytes
