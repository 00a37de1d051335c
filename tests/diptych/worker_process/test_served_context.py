"""Workers of a longrope model: those whose contexts choose other rotary factors exchange no blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.loaded_engine import LoadedEngine
from kvtransfer.drivers.handshake import incompatible_field
from tests.diptych.engine.models.family_models import config_of, oracle_of
from tests.diptych.runtime.tokenizer.small_models import byte_level


async def load(folder: Path, context: int | None) -> LoadedEngine:
    settings = DecodeSettings(
        model=str(folder), dtype="fp32", device="cpu", backend="torch", max_model_len=context
    )
    return await load_engine(settings)


@pytest.mark.parametrize(("case", "differ"), [("phi3-longrope", True), ("phi3", False)])
async def test_context_that_chooses_other_factors_is_another_layout(
    case: str, differ: bool, tmp_path: Path
) -> None:
    oracle_of(config_of(case)).save_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    whole, long, short = [await load(tmp_path, context) for context in (None, 64, 32)]
    assert incompatible_field(whole.fingerprint, long.fingerprint) is None
    assert incompatible_field(whole.fingerprint, short.fingerprint) == ("kv_layout" if differ else None)
