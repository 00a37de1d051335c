"""LoRA adapters of models with recurrent layers, served: mixed rows, loads, hits, and a lost worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from diptych.client import CallFailed, Client
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc
from tests.adapters import write_adapter
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_adapters import MODEL, SERVED, A, Adapted, B, ids_of
from tests.end_to_end.test_recurrent import SIZES
from tests.end_to_end.test_recurrent_families import FAMILIES, write

FULL = 300
"""Tokens of a stream whose worker is killed."""
IN_TORCH = ("--set", "prefill.backend=torch", "--set", "decode.backend=torch")
_ATTENTION = ("q_proj", "k_proj", "v_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "lfm2": (*_ATTENTION, "out_proj", "in_proj", "w1", "w2", "w3"),
    "qwen3_5_text": (*_ATTENTION, "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "granitemoehybrid": (*_ATTENTION, "o_proj", "in_proj", "out_proj"),
    "falcon_h1": (*_ATTENTION, "o_proj", "in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    "nemotron_h": (*_ATTENTION, "o_proj", "in_proj", "out_proj", "up_proj", "down_proj"),
    "jamba": (*_ATTENTION, "o_proj", "in_proj", "x_proj", "dt_proj", "out_proj"),
}


def model_of(folder: Path, family: str) -> Path:
    if family in FAMILIES:
        write(folder, family)
    else:
        tiny_model.write(folder, config_class=CONFIG_MAPPING[family], **SIZES)
    return folder


@pytest.mark.parametrize(
    ("family", "workers", "flags"),
    [
        pytest.param("lfm2", 1, [], marks=pytest.mark.full),
        *(pytest.param(family, 2, [], marks=pytest.mark.full) for family in TARGETS),
        pytest.param("jamba", 2, [*IN_TORCH, "--transport", "tcp"], marks=pytest.mark.full),
    ],
)
def test_mixed_rows_loads_and_a_lost_worker(
    family: str, workers: int, flags: list[str], tmp_path: Path
) -> None:
    """Lose a worker where there is another one."""
    folder = model_of(tmp_path / "model", family)
    base, targets = tiny_model.oracle(folder), TARGETS[family]

    def adapter(name: str, seed: int, targets: tuple[str, ...], **more: Any) -> Path:
        return write_adapter(tmp_path / name, base, seed=seed, targets=targets, **more)

    paths = {A: adapter("a", 1, targets), B: adapter("b", 2, targets[-3:], rank=8)}
    plain = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32", "--prefill-chunk", "48"]
    plain += ["--kv-blocks", "1200", "--max-loras", "2", "--decode-workers", str(workers), *flags]
    plain += [f"--lora={name}={path}" for name, path in paths.items()]
    with running_stack(*plain) as stack:
        served = Adapted(stack, folder, paths)
        _mixed(served)
        _loaded(served, adapter("c", 3, targets))
        if workers > 1:
            _lost(served)
        stack.wait_idle()


def _mixed(served: Adapted) -> None:
    """The base and two adapters in the same steps; they find no state of one another, but their own."""
    asked = [(name, tiny_model.prompt(length, length)) for length in (1, 33, 100) for name in SERVED]
    for (name, prompt), answer in zip(asked, served.ask(asked), strict=True):
        assert ids_of(answer) == served.greedy(name, prompt)
        assert answer.usage.cached_prompt_tokens == 0
    for name, prompt in asked[-len(SERVED) :]:
        served.finds_its_own(name, prompt)
    for _, prompt in asked:  # the control: each of the others would be noticed
        assert len({tuple(served.greedy(name, prompt)) for name in SERVED}) == len(SERVED)


def _loaded(served: Adapted, path: Path) -> None:
    """An adapter that comes and goes, and one that is refused by the name of a module."""
    refused = write_adapter(
        path.parent / "refused", tiny_model.oracle(served.folder), seed=4, targets=("q_proj",)
    )
    config = refused / "adapter_config.json"
    config.write_text(config.read_text().replace('["q_proj"]', '["q_proj", "conv1d", "conv"]'))
    with served.admin() as channel, Client(served.stack.address, retries=0) as client:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        stub.LoadAdapter(admin.LoadAdapterRequest(name="c", path=str(path)))
        served.tokens_of("c", path)
        stub.UnloadAdapter(admin.UnloadAdapterRequest(name="c"))
        with pytest.raises(CallFailed):
            client.generate(tiny_model.prompt(1, 4), lora="c", max_tokens=2)
        with pytest.raises(Exception, match="target_modules: 'conv"):
            stub.LoadAdapter(admin.LoadAdapterRequest(name="d", path=str(refused)))


def _lost(served: Adapted) -> None:
    """A stream of an adapter goes on in the same tokens once its decode worker is killed."""
    prompt = tiny_model.prompt(4000, 30)
    expected = served.greedy(A, prompt, FULL)
    with Client(served.stack.address) as client:
        stream = client.stream(prompt, lora=A, max_tokens=FULL, temperature=0.0, ignore_eos=True)
        got = [token for _ in range(20) for token in next(stream).token_ids]
        # None, where the stream was over before its worker could be killed.
        (busy,) = [n for n in (0, 1) if served.stack.metric("decode", "diptych_requests_running", n)]
        os.kill(served.stack.account["decode"][busy]["pid"], signal.SIGKILL)
        got += [token for chunk in stream for token in chunk.token_ids]
    assert got == expected
