"""`--kv-cache-dtype`: self-test and block sizes; workers pair with those of their own type only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig

from decode_worker.config import DecodeSettings
from diptych.engine.dtype import KVCacheDtype
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.loaded_engine import LoadedEngine
from kvtransfer.drivers.handshake import incompatible_field
from tests.diptych.runtime.tokenizer.small_models import byte_level

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def load(
    folder: Path, kept: KVCacheDtype, backend: Literal["torch", "native"] = "torch"
) -> LoadedEngine:
    settings = DecodeSettings(
        model=str(folder), dtype="fp32", device="cpu", backend=backend, kv_cache_dtype=kept
    )
    return await load_engine(settings)


async def test_fp8_engines_serve_and_pair_with_each_other_only(folder: Path) -> None:
    plain, kept, other = [await load(folder, kind) for kind in ("auto", "fp8", "fp8")]
    assert kept.layout.bytes_per_block * 4 == plain.layout.bytes_per_block
    assert kept.fingerprint.kv_dtype == "float8_e4m3fn"
    assert incompatible_field(kept.fingerprint, other.fingerprint) is None
    assert incompatible_field(kept.fingerprint, plain.fingerprint) == "kv_dtype"


@pytest.mark.parametrize("backend", ["torch", "native"])
async def test_int8_engines_serve_and_pair_with_each_other_only(
    folder: Path, backend: Literal["torch", "native"]
) -> None:
    plain, kept, other = [await load(folder, kind, backend) for kind in ("auto", "int8", "int8")]
    assert kept.layout.bytes_per_block * 16 * 4 == plain.layout.bytes_per_block * (16 + 4)
    assert kept.fingerprint.kv_dtype == "int8"
    assert kept.fingerprint.kv_layout != plain.fingerprint.kv_layout
    assert kept.model.backend_name == backend
    assert incompatible_field(kept.fingerprint, other.fingerprint) is None
    assert incompatible_field(kept.fingerprint, plain.fingerprint) == "kv_dtype"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cuda"}, "--kv-cache-dtype int8 is kept by CPUs only"),
        ({"backend": "triton"}, "--kv-cache-dtype int8: the Triton step does not keep keys"),
        ({"tensor_parallel": 2, "backend": "torch"}, "--kv-cache-dtype int8 is not kept with"),
    ],
)
def test_what_does_not_keep_int8_is_named(folder: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DecodeSettings(**{"model": str(folder), "device": "cpu", "kv_cache_dtype": "int8", **changes})


async def test_the_native_backend_refuses_fp8_kv(folder: Path) -> None:
    with pytest.raises(ValidationError, match="--kv-cache-dtype fp8: the native CPU step"):
        await load(folder, "fp8", "native")
