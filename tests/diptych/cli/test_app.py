import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.cli.stack_command import StackCommand
from diptych.cli.stack_options import FLAG_FIELDS, StackOptions, takes_stack_options
from tests.diptych.cli.specs import ROOT

_NUMBERS = (
    "_port",
    "_threads",
    "_size",
    "_chunk",
    "_mib",
    "_blocks",
    "_utilization",
    "_timeout",
    "_len",
    "_loras",
    "_rank",
    "_parts",
    "_tokens",
    "_parallel",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diptych", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_help_lists_every_command() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    for command in ("up", "gateway", "prefill", "decode", "generate", "demo", "doctor", "version"):
        assert f" {command} " in said


def test_version_prints_the_version() -> None:
    try:
        expected = version("diptych")
    except PackageNotFoundError:
        pytest.skip("runs from the source tree without an installation")
    for said in ("version", "--version"):
        assert CliRunner().invoke(app, [said]).stdout.strip() == expected


@pytest.mark.parametrize("command", ["version", "gateway --help", "decode --help", "bench --help"])
def test_modules_of_a_user_named_as_ours_are_not_imported(command: str, tmp_path: Path) -> None:
    for name in ("worker", "engine", "runtime", "gateway", "kernels", "launcher", "decode_worker"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "diptych", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_whose_packages_are_missing_names_the_extra() -> None:
    hidden = "import sys; sys.modules['typer'] = None; import diptych.__main__ as program; program.main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("diptych: the package 'typer' is not installed; this command needs it: ")
    assert done.stderr.endswith("pip install 'diptych[server]'\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-batch", "8"], "--set decode.max-batch=8"),
        (["--max-batch=8", "--insecure"], "--set decode.max-batch=8"),
        (["--metrics-compat", "vllm"], "--set gateway.metrics-compat=vllm"),
        (["--backend=torch"], "--set prefill.backend=torch --set decode.backend=torch"),
        (["--max-inflight"], "--set gateway.max-inflight=…"),
        (["--max-batches=8"], "No such option"),
        (["--worker-id=w"], "No such option"),
    ],
)
def test_up_says_how_a_program_gets_its_flag(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    refused = CliRunner().invoke(app, ["up", *arguments])
    assert refused.exit_code == 2
    assert told in refused.stderr


def test_a_mistyped_variable_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_BACTH", "8")
    done = run("up", "--grpc-port=0", "--http-port=0", "--model=/nowhere")
    assert done.stderr.count("DIPTYCH_MAX_BACTH") == 1
    decode = run("decode", "--grpc-port=x")
    assert "DIPTYCH_MAX_BACTH" not in decode.stderr  # the program itself says it, once its flags are right


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_more_threads_than_any_machine_has_cores_are_refused_by_the_flag(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    refused = CliRunner().invoke(app, ["up", f"--{role}-threads=100000"])
    assert refused.exit_code == 2
    assert f"--{role}-threads" in refused.stderr
    assert "less than or equal to 1024" in refused.stderr


@pytest.mark.parametrize(
    "arguments", [["--set", "nonsense"], ["--prefill-workers", "0"], ["--grpc-port", "70000"]]
)
def test_up_refuses_wrong_options_before_it_starts_anything(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["up", *arguments])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--model=/nowhere/model.gguf", "no model at"),
        ("--max-model-len=8193", "--max-model-len 8193: the model's files say that it reads 8192 tokens"),
        ("--model=/", "/ has no config.json, so that it is no model: a model is a .gguf file or a folder"),
        ("--model=README.md", "README.md is no model: a model is a .gguf file or a folder with config.json"),
        ("--device=cpu --transport=nccl", "--transport nccl needs blocks on a GPU, and this worker computes"),
        ("--device=cpu --kv-cache-dtype=fp8", "--kv-cache-dtype fp8: the native CPU step keeps keys"),
        ("--device=cuda --transport=shared_memory", "--transport shared_memory is for blocks of CPU workers"),
        ("--set=decode.model=/nowhere", "no model at /nowhere"),
        ("--host=0.0.0.0", "refusing to listen on 0.0.0.0"),
        ("--grpc-port=61999 --http-port=61999", "--grpc-port and --http-port are both 61999"),
        ("--grpc-port=61999 --http-port=62000", "both 62000"),
        ("--dtype=foo", "--dtype (DIPTYCH_DTYPE): Input should be 'auto', 'fp32'"),
        ("--device=foo", "--device (DIPTYCH_DEVICE): must be auto, cpu, cuda or cuda:N"),
        ("--transport=foo", "--transport (DIPTYCH_TRANSPORT): Input should be 'auto', 'shared_memory'"),
        ("--log-level=loud", "--log-level (DIPTYCH_LOG_LEVEL): Input should be 'debug'"),
        ("--block-size=0", "--block-size (DIPTYCH_BLOCK_SIZE): Input should be greater than"),
        ("--set=decode.max-batch=many", "--set decode.max-batch: Input should be a valid integer"),
        ("--set=decode.insecure=maybe", "--set decode.insecure=maybe: takes true or false"),
        ("--model=", "--model (DIPTYCH_MODEL): String should have at least 1 character"),
        ("--api-keys-file=/no", "--api-keys-file (DIPTYCH_API_KEYS_FILE): cannot read /no: No such file"),
        ("--tls-cert=/no --tls-key=/no", "--tls-cert (DIPTYCH_TLS_CERT): cannot read /no: No such file"),
        (
            "--tls-client-ca=/etc",
            "--tls-client-ca (DIPTYCH_TLS_CLIENT_CA): goes with --tls-cert and --tls-key",
        ),
        ("--set=decode.threads=1025", "--set decode.threads: Input should be less than or equal to"),
        ("--set=decode.max-batches=8", "--set decode.max-batches: no such flag (--max-batch?)"),
        ("--ready-file=/nope/x.json", "--ready-file: cannot write /nope/x.json: there is no folder /nope"),
        ("--ready-file=/proc/x", "--ready-file: cannot write /proc/x: /proc takes no new file"),
        ("--ready-file=/tmp", "--ready-file: cannot write /tmp: it is a folder"),
        ("--redis-url=foo", "--redis-url (DIPTYCH_REDIS_URL): must be like redis://"),
        (
            "--redis-url=redis://me:s3cret@127.0.0.1:1/0",
            "the directory at redis://127.0.0.1:1/0 does not answer",
        ),
    ],
)
def test_up_says_in_one_line_why_it_cannot_start(
    option: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within this process: it is over before anything starts."""
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["up", "--grpc-port=0", "--http-port=0", *option.split()])
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert problem in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [("MODEL", "/nowhere/model.gguf", "no model at"), ("HOST", "0.0.0.0", "refusing to listen on 0.0.0.0")],
)
def test_up_reads_the_variables_of_the_programs(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DIPTYCH_{variable}", value)
    done = run("up", "--grpc-port=0", "--http-port=0")
    assert done.returncode == 1
    assert problem in done.stderr


def test_every_flag_of_up_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    small = typer.Typer()
    seen: list[StackOptions] = []
    small.command(cls=StackCommand)(takes_stack_options()(lambda options: seen.append(options)))
    CliRunner().invoke(small, [], catch_exceptions=False)
    asked = {}
    for name in FLAG_FIELDS:
        now = getattr(seen[0], name)
        text = "1" if isinstance(now, bool | int) or name.endswith(_NUMBERS) else "some"
        monkeypatch.setenv(f"DIPTYCH_{name.upper()}", text)
        asked[name] = text
    CliRunner().invoke(small, [], catch_exceptions=False)
    got = {name: str(getattr(seen[1], name)) for name in asked}
    assert {name: "1" if text in ("True", "1.0") else text for name, text in got.items()} == asked
    assert len(asked) > 20


def test_threads_have_one_variable_for_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    small = typer.Typer()
    seen: list[StackOptions] = []
    small.command(cls=StackCommand)(takes_stack_options()(lambda options: seen.append(options)))
    monkeypatch.setenv("DIPTYCH_THREADS", "3")
    monkeypatch.setenv("DIPTYCH_DECODE_THREADS", "2")
    CliRunner().invoke(small, [], catch_exceptions=False)
    assert (seen[0].prefill_threads, seen[0].decode_threads) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["hello", "--max-tokens=-3"], "greater than or equal to 1"),
        (["hello", "--top-k=-2"], "greater than or equal to -1"),
        (["hello", "--address=http://127.0.0.1:50051"], "host:port, without a scheme"),
        ([b"caf\xe9"], "is not UTF-8"),
        (["hello", b"--stop=\xff"], "is not UTF-8"),
        (["hello", "--timeout=nan"], "greater than or equal to 0"),
        (["-"], "standard input is not UTF-8: byte 3 is"),
    ],
)
def test_generate_refuses_what_cannot_be_sent_by_its_name(arguments: list[str | bytes], problem: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diptych", "generate", *arguments],
        cwd=ROOT,
        input=b"caf\xe9",
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert problem in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_generate_names_the_server_that_it_cannot_reach() -> None:
    done = run("generate", "hello", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1: UNAVAILABLE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["generate", "hello"], 1),
        (["workers"], 1),
        (["bench"], 2),
        (["bench", "--base-url", "http://127.0.0.1:1"], 2),
    ],
)
def test_an_api_key_that_is_not_ascii_is_refused_in_a_line(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `up` shows where the key goes."""
    monkeypatch.setenv("DIPTYCH_API_KEY", "…")
    done = run(*arguments)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].endswith(
        "DIPTYCH_API_KEY: an API key has printable ASCII characters only"
    )
    assert "Traceback" not in done.stderr
