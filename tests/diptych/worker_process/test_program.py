"""Workers that cannot start, as real processes: the error is one line."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decode_worker.config import DecodeSettings
from diptych.worker_process import engine_loader
from kvtransfer.transports.registry import UnusableTransport
from prefill_worker.config import PrefillSettings
from tests.end_to_end import tiny_model
from tests.forms import FULL

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model, which is loaded at once."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("module", "flags", "problem"),
    [
        ("prefill_worker", ("--model={folder}",), "is a folder with a GGUF file: pass the file, --model"),
        pytest.param(
            "decode_worker",
            ("--model={folder}/model.gguf",),
            "model.gguf is no GGUF file, though it is named",
            marks=FULL,
        ),
        pytest.param(
            "decode_worker",
            ("--max-model-len=8193",),
            "--max-model-len 8193: the model's files say that it reads 8192 tokens at most",
            marks=FULL,
        ),
        (
            "decode_worker",
            ("--model={tiny}", "--device=cpu", "--kv-memory-mib=9999999"),
            "a pool of 9999999 MiB",
        ),
        pytest.param(
            *("decode_worker", ("--device=cuda",), "device cuda: torch"),
            marks=[FULL, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")],
        ),
    ],
)
def test_a_startup_error_is_one_line(
    module: str, flags: tuple[str, ...], problem: str, tmp_path: Path, tiny: Path
) -> None:
    (tmp_path / "model.gguf").write_text("no model")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            "--log-level=error",
            *(flag.format(folder=tmp_path, tiny=tiny) for flag in flags),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert problem in line
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--quantization=fp8",), "--quantization fp8 is computed on GPUs only"),
        (("--dtype=fp16",), "--dtype fp16 is computed on GPUs only, and this worker computes on the CPU"),
        (
            ("--transport=nccl",),
            "--transport nccl needs blocks on a GPU, and this worker computes on the CPU",
        ),
        (("--transport=cuda_ipc",), "--transport cuda_ipc needs blocks on a GPU"),
        (("--kv-cache-dtype=fp8",), "--kv-cache-dtype fp8: the native CPU step keeps"),
        (("--backend=triton",), "--backend triton needs a GPU"),
    ],
)
def test_settings_that_no_cpu_has_are_refused_as_flags(
    flags: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton computes on CPUs, for tests
    for settings in (PrefillSettings, DecodeSettings):
        with pytest.raises(SystemExit, match="2"):
            settings.from_argv(["--device=cpu", *flags])
        [line] = capsys.readouterr().err.splitlines()
        assert problem in line
    assert DecodeSettings.from_argv(["--device=auto", *flags]), "known once the device is"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--transport=shared_memory",), "--transport shared_memory is for blocks of CPU workers"),
        (("--backend=native",), "--backend native computes on CPUs"),
        (("--backend=torch",), "--backend torch computes on CPUs"),
        (("--quantization=gguf",), "--quantization gguf is computed on CPUs only"),
        (("--block-size=48",), "--block-size 48: on a GPU it is a power of two"),
    ],
)
def test_settings_that_no_gpu_has_are_refused_as_flags(
    flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        DecodeSettings.from_argv(["--device=cuda:1", *flags])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--transport=gloo",), ("--transport=tcp",), ("--transport=auto",)])
def test_transports_of_both_devices_pass_on_either(flags: tuple[str, ...]) -> None:
    for device in ("cpu", "cuda"):
        assert PrefillSettings.from_argv([f"--device={device}", *flags]).device == device


@pytest.mark.parametrize("flags", [["--kv-cache-dtype=fp8", "--backend=torch"], ["--quantization=int8"]])
def test_settings_that_a_cpu_has_pass(flags: list[str]) -> None:
    assert DecodeSettings.from_argv(["--device=cpu", *flags]).device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_transport_is_refused_before_the_model_is_read_once_the_device_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loader, "load_whole", None)
    settings = DecodeSettings.from_argv(["--device=auto", "--transport=nccl"])
    with pytest.raises(engine_loader.ImpossibleSettings, match="--transport nccl needs blocks on a GPU"):
        await engine_loader.load_engine(settings)


async def test_transport_of_a_hosted_worker_is_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loader, "choose_device", torch.device)
    monkeypatch.setattr(engine_loader, "fetched_model", None)
    settings = DecodeSettings.from_argv(["--device=cuda", "--transport=tcp"])
    with pytest.raises(UnusableTransport, match="--transport tcp: workers of one process on a GPU"):
        await engine_loader.load_engine(settings.model_copy(update={"hosted": True}))


async def test_images_beside_a_draft_model_are_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("load_whole", "load_in_parts"):
        monkeypatch.setattr(engine_loader, name, None)
    monkeypatch.setattr(engine_loader, "model_images", lambda path, mmproj: SimpleNamespace(spec=path))
    settings = PrefillSettings.from_argv(["--device=cpu", "--speculative-model=bundled"])
    problem = "--speculative-model does not go with a model that reads images"
    with pytest.raises(engine_loader.ImpossibleSettings, match=problem):
        await engine_loader.load_engine(settings)


LOADING = """
import asyncio, sys, time
import decode_worker.worker
from decode_worker.__main__ import main

async def load(settings):
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 60)

decode_worker.worker.load_engine = load
sys.exit(main([]))
"""


def test_a_signal_while_loading_ends_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(30) == 0


def test_a_pool_smaller_than_a_context_is_logged(tiny: Path) -> None:
    command = [sys.executable, "-m", "decode_worker", "--device=cpu", "--redis-url=redis://127.0.0.1:1/0"]
    with subprocess.Popen(
        [*command, f"--model={tiny}", "--kv-blocks=8"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " ready {" in line:
                break
        process.terminate()
    [told] = [line for line in lines if "the KV pool holds" in line]
    assert f"the model's context has {tiny_model.CONTEXT}: longer requests are refused" in told
