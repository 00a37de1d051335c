"""What `up` asks before anything starts: ports, and the directory. Without a directory: test_cli.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from diptych.cli.preflight import BadOptions, check_directory, check_options
from diptych.cli.stack_options import StackOptions
from tests.diptych.cli.specs import ROOT
from tests.diptych.runtime.odd_models import CASES
from tests.gateway.adapters.folders import write
from tests.gateway.running_gateway import valkey


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as found:
        yield found


def with_login(url: str, login: str) -> str:
    return f"redis://{login}@{url.removeprefix('redis://')}"


async def test_check_directory_accepts_a_server_that_answers(url: str) -> None:
    await check_directory(url)


async def test_check_directory_accepts_a_login_that_may_not_ping(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.acl_setuser(
            "quiet", enabled=True, passwords=["+word"], categories=["+@all"], commands=["-ping"]
        )
    await check_directory(with_login(url, "quiet:word"))


async def test_check_directory_names_a_refused_login(url: str) -> None:
    with pytest.raises(BadOptions, match="refuses this login") as refused:
        await check_directory(with_login(url, "nobody:s3cret"))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("case", ["lfs_gguf", "only_pickles", "split", "wrapper", "architecture", "adapter"])
def test_files_that_are_no_model_are_refused_before_anything_starts(case: str, tmp_path: Path) -> None:
    write, said = CASES[case]
    with pytest.raises(BadOptions, match=said):
        check_options(StackOptions(model=str(write(tmp_path))))


def test_what_refuses_a_model_imports_no_torch(tmp_path: Path) -> None:
    """A refusal takes less than a second: torch alone takes two."""
    pointer, _ = CASES["lfs_gguf"]
    program = (
        "import sys; from diptych.__main__ import main; sys.argv[1:] = ['up', '--model', sys.argv[1]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code, end\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules), 'heavy'"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(pointer(tmp_path))], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "is a Git LFS pointer" in ran.stderr


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_blank_model_name_is_refused(name: str) -> None:
    with pytest.raises(BadOptions, match=r"--model-name \(DIPTYCH_MODEL_NAME\): must not be blank"):
        check_options(StackOptions(model_name=name))


def test_max_model_len_goes_to_every_program_and_is_refused_above_the_models() -> None:
    assert {one.max_model_len for one in check_options(StackOptions(max_model_len=100))} == {100}
    with pytest.raises(BadOptions, match=r"--max-model-len 8193: .* it reads 8192 tokens at most"):
        check_options(StackOptions(max_model_len=8193))
    with pytest.raises(BadOptions, match="--max-model-len 9000"):
        check_options(StackOptions(overrides=(("decode", "max-model-len", "9000"),)))


def test_check_options_is_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a working tree the programs' commands have one word more."""
    for folder in (ROOT, tmp_path):
        monkeypatch.chdir(folder)
        settings = check_options(StackOptions(block_size=32))
        assert [one.program for one in settings] == ["gateway", "decode", "prefill"]
        assert {one.block_size for one in settings} == {32}


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("grpc_port", "--grpc-port and --http-port choose others, 0 = any free one"),
        ("http_port", "--grpc-port and --http-port choose others, 0 = any free one"),
        ("admin_port", "--admin-port choose others, 0 = any free one"),
    ],
)
def test_check_options_names_the_flags_of_a_taken_port(field: str, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"grpc_port": 0, "http_port": 0, "admin_port": 0, field: port}
        with pytest.raises(BadOptions, match=f"^port {port} of 127.0.0.1 is taken: {told}$"):
            check_options(StackOptions(**ports))


def test_files_that_are_no_adapter_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadOptions, match=f"--lora legal: no adapter at {tmp_path}/legal"):
        check_options(StackOptions(lora=f"legal={tmp_path}/legal"))
    with pytest.raises(BadOptions, match="rank 9, and --max-lora-rank is 8"):
        check_options(StackOptions(lora=f"legal={write(tmp_path / 'legal', rank=9)}", max_lora_rank=8))
    with pytest.raises(BadOptions, match=r"lora.*NAME=PATH"):
        check_options(StackOptions(lora="legal"))
    check_options(StackOptions(lora=f"legal={tmp_path}/legal,other={tmp_path}/legal", max_lora_rank=9))
