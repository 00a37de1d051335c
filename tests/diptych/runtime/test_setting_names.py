"""Names of settings: vLLM's, those of the release before, and their precedence by source."""

from dataclasses import fields
from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.cli.stack_options import StackOptions
from diptych.runtime.flag_names import RENAMED, SYNONYMS, canonical
from diptych.runtime.settings_sources import BadSettings
from gateway.config import GatewaySettings
from prefill_worker.config import PrefillSettings

PROGRAMS = (GatewaySettings, PrefillSettings, DecodeSettings)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DTYPE", "QUANTIZATION", "MAX_BATCH", "WORKER_SHUTDOWN_TIMEOUT", "DRAIN_S"):
        monkeypatch.delenv(f"DIPTYCH_{name}", raising=False)


@pytest.mark.parametrize("name", [*RENAMED, *SYNONYMS])
def test_every_other_name_sets_a_setting_of_some_program(name: str) -> None:
    field = canonical(name, "8M" if name.startswith("kv_cache_memory") else "8")[0]
    known = {one.name for one in fields(StackOptions)}.union(*(one.model_fields for one in PROGRAMS))
    assert field in known
    assert name not in known


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [
        ("4294967296", "4096"),
        ("4G", "4096"),
        ("4GiB", "4096"),
        ("1.5G", "1536"),
        ("2g", "1907"),
        ("64M", "64"),
    ],
)
def test_kv_cache_memory_is_in_bytes_or_has_a_suffix(text: str, mebibytes: str) -> None:
    assert canonical("kv_cache_memory", text) == ("kv_memory_mib", mebibytes)


@pytest.mark.parametrize("text", ["4096", "much", "", "-1G"])
def test_kv_cache_memory_below_a_mebibyte_is_refused(text: str) -> None:
    with pytest.raises(BadSettings, match=r"--kv-cache-memory \(DIPTYCH_KV_CACHE_MEMORY\): "):
        DecodeSettings.read_argv([f"--kv-cache-memory={text}"])


def test_names_of_vllm_warn_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    settings = DecodeSettings.from_argv(["--max-num-seqs=8", "--num-gpu-blocks-override", "99"])
    assert (settings.max_batch, settings.kv_blocks) == (8, 99)
    assert PrefillSettings.from_argv(["--max-num-batched-tokens=77"]).prefill_chunk == 77
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--drain-s=3"], "--drain-s is now --worker-shutdown-timeout"),
        (["--dtype", "int8"], "--dtype int8 is now --quantization int8"),
    ],
)
def test_old_flags_work_and_warn_in_a_line(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DecodeSettings.from_argv(argv)
    assert settings.worker_shutdown_timeout == 3 or settings.engine_dtype == "int8"
    assert capsys.readouterr().err == f"diptych decode: {line}\n"


def test_old_switches_can_be_turned_off() -> None:
    assert GatewaySettings.read_argv(["--share-ports"]).reuse_port
    assert not GatewaySettings.read_argv(["--share-ports", "--no-share-ports"]).reuse_port


def test_old_variables_and_keys_warn_and_today_s_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DIPTYCH_DRAIN_S", "3")
    assert DecodeSettings.from_argv([]).worker_shutdown_timeout == 3
    assert capsys.readouterr().err.endswith("DIPTYCH_DRAIN_S is now DIPTYCH_WORKER_SHUTDOWN_TIMEOUT\n")
    monkeypatch.setenv("DIPTYCH_WORKER_SHUTDOWN_TIMEOUT", "4")
    assert DecodeSettings.from_argv(["--death-fd=9"]).worker_shutdown_timeout == 4
    assert capsys.readouterr().err == "", "the launcher says it"
    (tmp_path / "f.yaml").write_text("links: grpc\ndtype: int8\n")
    DecodeSettings.from_argv([f"--config={tmp_path}/f.yaml", "--drain-s=5"])
    *_, links, dtype = (line for line in capsys.readouterr().err.splitlines() if "f.yaml" in line)
    assert links.endswith("f.yaml:1: links is now worker-rpc")
    assert dtype.endswith("f.yaml:2: dtype: int8 is now quantization: int8")


@pytest.mark.parametrize(
    ("argv", "computed"),
    [
        ([], "int8"),
        (["--dtype=bf16"], "bf16"),
        (["--dtype=auto"], "auto"),
        (["--dtype=gguf"], "gguf"),
        (["--quantization=gguf"], "gguf"),
        (["--quantization=int8", "--dtype=auto"], "int8"),
    ],
)
def test_dtype_and_quantization_are_one_choice_of_one_source(
    argv: list[str], computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_DTYPE", "int8")
    assert DecodeSettings.read_argv(argv).engine_dtype == computed


def test_quantization_with_another_dtype_is_refused() -> None:
    with pytest.raises(BadSettings, match="--quantization int8 computes in its own type: leave --dtype auto"):
        DecodeSettings.read_argv(["--quantization=int8", "--dtype=bf16"])
