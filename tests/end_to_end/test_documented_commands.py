"""Every command of the documents is run, or checked by the tool that would run it, and none is left out.

A command is matched with the first handler whose pattern fits; one that fits none fails the test, so that a
new one cannot stand in a document unseen. Programs that run until they are stopped are checked by `diptych
config`, which takes their flags; that `diptych up` serves is what the other tests stand on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import grpc
import pytest
import trustme
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from decode_worker.config import DecodeSettings
from diptych.cli.app import app
from diptych.runtime.settings import ProgramSettings
from gateway.config import GatewaySettings
from prefill_worker.config import PrefillSettings
from prefill_worker.encoder.config import EncodeSettings
from tests.end_to_end.documented_commands import Command, commands_of
from tests.end_to_end.reference import model_file
from tests.end_to_end.stack import Stack
from tests.gateway.adapters.folders import write as write_adapter

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", ROOT / "lab/README.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"log", "_build"} & set(page.parts)]
COMMANDS = [command for page in PAGES for command in commands_of(page, ROOT)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
DIPTYCH = [sys.executable, "-m", "diptych"]
FOREIGN = ("openssl", "export", "printf", "podman", "git", "cd", "kubectl")
"""Commands of other tools; what of them is ours (flags, files, manifests) is tested where it lies."""


SETTINGS: dict[str, type[ProgramSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encode": EncodeSettings,
}


def run(words: list[str], *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def invoke(words: list[str], *, cwd: Path = ROOT) -> str:
    """Run a command of `diptych` that starts nothing in this process, which has its imports; return what it
    prints.
    """
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"diptych {shlex.join(words)}\n{done.output[-2000:]}\n{done.exception!r}"
    return done.output


def run_make(command: Command, stack: Stack, folder: Path) -> None:
    """Expand the target without running it; the suite itself runs behind `make test`."""
    run(["make", "-n", *command.words[1:]])


MODELS = ("BIG", "GLM-4.5", "SMALL", "SmolVLM-256M-Instruct", "SmolVLM-256M-Instruct-Q8_0.gguf")
"""Names on the pages that stand for a model of the reader's own."""


def run_help(command: Command, stack: Stack, folder: Path) -> None:
    run([sys.executable, *command.words[1:3], "--help"])


def check_flags(command: Command, stack: Stack, folder: Path) -> None:
    """Let the program read its flags as it would at the start, without starting it."""
    role, *flags = command.words[1:]
    flags = [str(model_file()) if flag in MODELS else flag for flag in flags]
    flags = [re.sub(r"^([\w-]+=)?/models/\S+$", rf"\g<1>{model_file()}", flag) for flag in flags]
    for name in ("legal", "support"):  # LoRA adapters
        path = write_adapter(folder / name)
        flags = [flag.replace(f"/adapters/{name}", str(path)) for flag in flags]
    if "--mmproj" in flags:  # the model that stands in reads text only
        at = flags.index("--mmproj")
        flags[at : at + 2] = []
    if role == "up":
        invoke(["config", *flags], cwd=folder)
        return
    _write_files(folder)
    if "--internal-tls" in flags:
        invoke(["certificates", "certificates"], cwd=folder)
    with contextlib.chdir(folder):
        SETTINGS[role].read_argv(flags)


def check_ray_flags(command: Command, stack: Stack, folder: Path) -> None:
    """Let `diptych up` read its flags up to the cluster; test_ray.py runs it on some."""
    with mock.patch("diptych.cli.ray_cluster.foreground.serve_on_ray", return_value=0) as served:
        invoke(command.words[1:], cwd=folder)
    served.assert_called_once()


def _write_files(folder: Path) -> None:
    """Write the files that the page has made before: keys.jsonl, cert.pem and key.pem."""
    certificate = trustme.CA().issue_cert("10.0.0.1")
    (folder / "key.pem").touch(0o600)
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    keys = CliRunner().invoke(app, ["key", "new", "--tenant", "billing"]).stdout
    (folder / "keys.jsonl").touch(0o600)
    (folder / "keys.jsonl").write_text(keys)


def run_client_command(command: Command, stack: Stack, folder: Path) -> None:
    """Run a command that asks a running server, at the test's own."""
    name, *rest = command.words[1:]
    address = stack.address if name == "generate" else stack.admin_address
    output = run([*DIPTYCH, name, *(one for one in rest if one != "ID"), "--address", address]).stdout
    assert output.strip()


def show_help(command: Command, stack: Stack, folder: Path) -> None:
    invoke([command.words[1], "--help"])


def run_plain(command: Command, stack: Stack, folder: Path) -> None:
    run([*DIPTYCH, *command.words[1:]], cwd=folder)


def run_bench(command: Command, stack: Stack, folder: Path) -> None:
    """Read the flags as a run does, up to the first request."""
    words = command.words[2:]
    files = {"trace.jsonl": "mooncake_conversation.jsonl", "ShareGPT.json": None, "tokenizer.json": None}
    if any(word in files for word in words):
        pytest.skip("needs files of the reader's own; tests/diptych/bench reads such files")
    port = str(stack.account["gateway"]["http_port"])
    words = [word.replace("8080", port) for word in words]
    words = ["1" if re.fullmatch(r"\d+(,\d+)+", word) else word for word in words]
    reach = [] if "--base-url" in words else ["--address", stack.address]
    short = ["--num-prompts", "2", "--random-output-len", "4"]
    run([*DIPTYCH, "bench", *words, *reach, *short], cwd=folder)


def run_curl(command: Command, stack: Stack, folder: Path) -> None:
    port = stack.account["gateway"]["http_port"]
    answer = json.loads(run([word.replace("8000", str(port)) for word in command.words]).stdout)
    if any(word.endswith("tokenize") for word in command.words):
        assert answer.get("tokens") or answer["prompt"]
    elif any("/v2/" in word for word in command.words):
        [text] = [one["data"][0] for one in answer["outputs"] if one["name"] == "text_output"]
        assert "Paris" in text
    else:
        assert "Paris" in answer["choices"][0]["message"]["content"]


def run_grpcurl(command: Command, stack: Stack, folder: Path) -> None:
    """Do what grpcurl does: find the method by reflection, send the JSON, print JSON."""
    words = [word for word in command.words[1:] if word != "-plaintext"]
    data = words[words.index("-d") + 1] if "-d" in words else "{}"
    name = words[-1]
    with grpc.insecure_channel(stack.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if name == "list":
            assert "diptych.v1.InferenceService" in database.get_services()
            return
        service, _, method = name.partition("/")
        found = DescriptorPool(database).FindServiceByName(service).FindMethodByName(method)
        request = json_format.Parse(data, message_factory.GetMessageClass(found.input_type)())
        call = channel.unary_stream(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(found.output_type).FromString,
        )
        answers = [json_format.MessageToJson(one) for one in call(request, timeout=60)]
    assert answers


def check_install(command: Command, stack: Stack, folder: Path) -> None:
    """Look up the extra in pyproject.toml; tests/packaging installs for real."""
    extras = re.findall(r"\[(\w+)\]", command.text)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def run_example(command: Command, stack: Stack, folder: Path) -> None:
    run([sys.executable, command.words[1], stack.address])


def nothing(command: Command, stack: Stack, folder: Path) -> None:
    return


HANDLERS: list[tuple[str, Callable[[Command, Stack, Path], None]]] = [
    (r"make ", run_make),
    (r"(\S*python\S*) -m (lab|tests)[. ]", run_help),
    (r"\S*python\S* examples/", run_example),
    (r"diptych up --ray\b", check_ray_flags),
    (r"diptych (up|gateway|prefill|decode|encode)\b", check_flags),
    (r"diptych generate --image\b", show_help),  # test_images.py runs it
    (r"diptych (generate|workers|flush|lora list|model list)\b", run_client_command),
    (
        r"diptych (lora|model) (load|unload|alias)\b",
        lambda command, stack, folder: invoke([*command.words[1:3], "--help"]) and None,
    ),
    (
        r"diptych (drain|role|restart|run-batch|top|rank)\b",
        show_help,
    ),
    (r"diptych bench\b", run_bench),
    (r"diptych (config|doctor|version|certificates)\b", run_plain),
    (r"sudo diptych units\b", lambda command, stack, folder: run([*DIPTYCH, "units", str(folder)]) and None),
    (r"sudo systemctl ", nothing),
    (r"\(umask 077; diptych key new", nothing),  # tests/end_to_end/test_readme.py runs it
    (r"curl ", run_curl),
    (r"grpcurl ", run_grpcurl),
    (r"pip install ", check_install),
    (rf"({'|'.join(FOREIGN)})\b", nothing),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: f"{one.page}: {one.text.splitlines()[0][:60]}")
def test_the_command_works(command: Command, bundled: Stack, tmp_path: Path) -> None:
    for pattern, handler in HANDLERS:
        if re.match(pattern, command.text):
            handler(command, bundled, tmp_path)
            return
    pytest.fail(f"{command.page} shows a command that no handler runs: {command.text}")


def test_a_command_that_does_not_exist_is_noticed(bundled: Stack, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no-such-flag"):
        check_flags(Command("x.md", "diptych up --no-such-flag 1"), bundled, tmp_path)
