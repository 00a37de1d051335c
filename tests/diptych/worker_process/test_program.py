"""Workers that cannot start, as real processes: the error is one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("module", "flags", "problem"),
    [
        ("prefill_worker", ("--model={folder}",), "no config.json in"),
        ("decode_worker", ("--model={folder}/model.gguf",), "model.gguf: not a GGUF file"),
        ("decode_worker", ("--device=cpu", "--dtype=fp16"), "dtype fp16 is not computed on cpu"),
        ("prefill_worker", ("--device=cpu", "--transport=nccl"), "--transport nccl needs blocks on a GPU"),
        (
            "decode_worker",
            ("--device=cpu", "--kv-memory-mib=9999999"),
            "a pool of 9999998 MiB",
        ),
        pytest.param(
            *("decode_worker", ("--device=cuda",), "device cuda: torch"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_startup_error_is_one_line(
    module: str, flags: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_text("no model")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            "--log-level=error",
            *(flag.format(folder=tmp_path) for flag in flags),
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


LOADING = """
import asyncio, sys, time
import diptych.worker_process.program
from decode_worker.__main__ import main

async def load(settings):
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 60)

diptych.worker_process.program.load_engine = load
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


def test_a_pool_smaller_than_a_context_is_logged() -> None:
    command = [sys.executable, "-m", "decode_worker", "--device=cpu", "--redis-url=redis://127.0.0.1:1/0"]
    with subprocess.Popen(
        [*command, "--kv-memory-mib=1"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " ready {" in line:
                break
        process.terminate()
    [told] = [line for line in lines if "the KV pool holds" in line]
    assert "the model's context has 8192: longer requests are refused" in told
