"""`diptych config`, and configuration files of `diptych up`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decode_worker.config import DecodeSettings
from diptych.cli.app import app
from diptych.cli.preflight import check_options
from diptych.cli.stack_options import FLAG_FIELDS, option_rows
from diptych.runtime.cli_flags import setting_rows
from diptych.runtime.settings import config_digest
from gateway.config import GatewaySettings

FILE = """\
quantization: int8
grpc-port: 0
max-queue-delay-s: auto
worker-rpc: grpc
decode:
  max-batch: 7
  kv-blocks: 100
prefill:
  max-batch-requests: 3
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("MAX_BATCH", "KV_BLOCKS", "DTYPE", "QUANTIZATION"):
        monkeypatch.delenv(f"DIPTYCH_{name}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serving.yaml"
    path.write_text(FILE)
    return path


def config(*flags: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["config", "--json", *flags])
    assert done.exit_code == 0, done.output
    values: dict[str, object] = json.loads(done.stdout)
    return values


def refused(*flags: str) -> str:
    done = CliRunner().invoke(app, ["config", *flags])
    assert done.exit_code in (1, 2)
    return " ".join(done.stderr.split())


def test_config_names_the_origin_of_each_value(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_BATCH", "9")
    monkeypatch.setenv("DIPTYCH_SECRET", "ab" * 16)
    values = config(f"--config={file}", "--decode-workers=2", "--set", "decode.decode-pacing=1")
    assert values["decode-workers"] == {"value": 2, "origin": "--decode-workers"}
    assert values["quantization"] == {"value": "int8", "origin": f"{file}:1"}
    assert values["model"] == {"value": "bundled", "origin": "default"}
    assert values["secret"] == {"value": "hidden", "origin": "DIPTYCH_SECRET"}
    decode, prefill, gateway = values["decode"], values["prefill"], values["gateway"]
    assert isinstance(decode, dict)
    assert isinstance(prefill, dict)
    assert isinstance(gateway, dict)
    assert decode["max-batch"] == {"value": 9, "origin": "DIPTYCH_MAX_BATCH"}
    assert decode["kv-blocks"] == {"value": 100, "origin": f"{file}:7"}
    assert decode["decode-pacing"] == {"value": 1.0, "origin": "--set"}
    assert decode["worker-rpc"] == prefill["worker-rpc"] == {"value": "grpc", "origin": f"{file}:4"}
    assert prefill["max-batch-requests"] == {"value": 3, "origin": f"{file}:9"}
    assert gateway["max-queue-delay-s"] == {"value": "auto", "origin": f"{file}:3"}


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [((), 100), (("--kv-blocks=5",), 5), (("--kv-blocks=5", "--set=decode.kv-blocks=6"), 6)],
)
def test_flags_win_over_a_section_and_set_over_both(
    flags: tuple[str, ...], blocks: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = config(f"--config={file}", *flags)["digest"]
    same = config(
        "--quantization=int8",
        "--set=gateway.max-queue-delay-s=auto",
        "--set=decode.max-batch=7",
        "--set=decode.worker-rpc=grpc",
        "--set=prefill.worker-rpc=grpc",
        "--set=prefill.max-batch-requests=3",
        f"--kv-blocks={blocks}",
    )
    assert digests == same["digest"]


def test_variables_win_over_a_section(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_KV_BLOCKS", "8")
    assert config(f"--config={file}")["kv-blocks"] == {"value": 8, "origin": "DIPTYCH_KV_BLOCKS"}
    monkeypatch.setenv("DIPTYCH_DTYPE", "bf16")
    values = config(f"--config={file}")
    assert values["dtype"] == {"value": "bf16", "origin": "DIPTYCH_DTYPE"}
    assert values["quantization"] == {"value": "auto", "origin": "default"}


def test_the_output_of_config_is_a_file_for_config(file: Path, tmp_path: Path) -> None:
    flags = [f"--config={file}", "--model-name=a: b"]
    printed = CliRunner().invoke(app, ["config", *flags])
    again = tmp_path / "again.yaml"
    again.write_text(printed.stdout)
    first, second = config(*flags), config(f"--config={again}")
    assert first["digest"] == second["digest"]
    assert str(first["digest"]) in printed.stdout.splitlines()[0]
    assert second["model-name"] == {"value": "a: b", "origin": f"{again}:8"}


def test_the_digest_is_that_which_the_processes_are_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.cli.stack_options import StackOptions

    digest = config_digest(check_options(StackOptions(decode_workers=2, block_size=32)))
    assert config("--grpc-port=0", "--decode-workers=2", "--block-size=32")["digest"] == digest


def test_config_hides_the_login_of_the_directory() -> None:
    done = CliRunner().invoke(app, ["config", "--redis-url=redis://me:s3cret@127.0.0.1:1/0"])
    assert done.exit_code == 0
    assert "s3cret" not in done.output
    assert "# redis-url: redis://127.0.0.1:1/0" in done.stdout


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("max-bacth: 3", ":1: max-bacth: no such setting (max-batch?)"),
        ("decode: {max-inflight: 3}", ":1: max-inflight: not a setting of this section"),
        ("gateway: {grpc-port: 3}", ":1: grpc-port: not a setting of this section"),
        ("prefill-workers: 0", ":1: prefill-workers: Input should be greater than or equal to 1"),
        ("block-size: 0", ":1: block-size: Input should be greater than or equal to 1"),
        ("decode:\n  max-batch: many", ":2: max-batch: Input should be a valid integer"),
        ("max-batch: many", ":1: max-batch: Input should be a valid integer"),
        ("kv-cache-memory: 5", ":1: kv-cache-memory: is less than 1 MiB"),
    ],
)
def test_faults_of_a_file_name_file_line_and_key(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    assert f"{path}{fault}" in refused(f"--config={path}")


def test_old_names_of_flags_warn_in_a_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["config", "--dtype", "int8", "--drain-s=3", "--set=decode.itl-stretch=1"])
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "diptych: --dtype int8 is now --quantization int8",
        "diptych: --drain-s is now --worker-shutdown-timeout",
        "diptych: --set decode.itl-stretch is now --set decode.decode-pacing",
    ]


def test_rows_of_the_reference_are_complete() -> None:
    assert {row.flag.removeprefix("--").replace("-", "_") for row in option_rows()} == {
        "config",
        *FLAG_FIELDS,
    }
    for settings in (GatewaySettings, DecodeSettings):
        rows = {row.flag: row for row in setting_rows(settings)}
        assert all(row.description.endswith(".") and row.section and row.type for row in rows.values())
        assert len(rows) == len(settings.public_fields()) + 1
    rows = {row.flag: row for row in setting_rows(DecodeSettings)}
    batch = rows["--max-batch"]
    assert (batch.variable, batch.type, batch.default) == ("DIPTYCH_MAX_BATCH", "integer 1–1024", "64")
    assert batch.synonyms == ("--max-num-seqs",)
    assert rows["--decode-pacing"].old_names == ("--itl-stretch",)
