"""Loading of a worker's model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.config import DecodeSettings
from diptych.engine.runner import Runner
from diptych.worker_process import engine_loader as engine
from diptych.worker_process.config import why_not_together
from diptych.worker_process.group.load import load_in_parts
from tests.end_to_end import tiny_model


class Reached(Exception):
    """Raised where the model would be read."""


@pytest.mark.parametrize("threads", [1, 3])
async def test_weights_are_converted_on_the_configured_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    seen: list[int] = []

    def load_whole(*_: Any, **__: Any) -> None:
        seen.append(torch.get_num_threads())
        raise Reached

    monkeypatch.setattr(engine, "load_whole", load_whole)
    before = torch.get_num_threads()
    settings = DecodeSettings.from_argv([f"--threads={threads}", "--dtype=fp32", "--device=cpu"])
    with pytest.raises(Reached):
        await engine.load_engine(settings)
    assert seen == [threads]
    torch.set_num_threads(before)


def test_a_model_in_parts_takes_adapters_by_the_triton_step_too(tmp_path: Path) -> None:
    settings = DecodeSettings.from_argv(["--sum-parts=2", "--device=cpu", "--backend=triton"])
    model = load_in_parts(settings, tiny_model.write(tmp_path), "fp32", torch.device("cpu"), None)
    assert model.backend_name == "triton-parts"
    assert Runner(model).allow_adapters(8, 64) is None


@pytest.mark.parametrize("tokens", [48, 256])
def test_a_block_size_that_a_gpu_cannot_read_is_refused(tokens: int) -> None:
    settings = DecodeSettings.from_argv([f"--block-size={tokens}", "--device=auto"])
    assert why_not_together(settings, "cpu") is None
    assert f"--block-size {tokens}: on a GPU" in str(why_not_together(settings, "cuda"))
    assert why_not_together(DecodeSettings.from_argv(["--block-size=128"]), "cuda") is None


def test_only_workers_on_a_cpu_share_cores() -> None:
    """A worker on a GPU must not make its streams wait for prompts that its cores cannot compute."""
    fd = os.memfd_create("cores")
    settings = DecodeSettings.from_argv([f"--cores-fd={fd}", "--home-cores=1", "--machine-cores=2"])
    share = engine.shared_cores(settings, torch.device("cpu"))
    assert share is not None
    assert (share.num_home, share.others) == (1, [0])
    assert engine.shared_cores(settings, torch.device("cuda")) is None
    os.close(fd)
