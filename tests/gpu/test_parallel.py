"""Groups on GPUs: ranks that share a card over Gloo, and with two cards NCCL and the cards' own memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen2MoeConfig

from tests.diptych.engine.parallel.test_communicators import free_port, start
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.rank_processes import answer
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_adapters import Adapted
from tests.end_to_end.test_expert_parallel import ALL_TO_ALL, PROMPTS, SHARED, greedy
from tests.end_to_end.test_expert_parallel import TOKENS as EXPERT_TOKENS
from tests.end_to_end.test_group_adapters import Model, change_adapters, check_all

TOKENS = reference.MOST_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("host", 2), pytest.param("nccl", 2, marks=needs_two), pytest.param("peers", 2, marks=needs_two)],
)
def test_every_rank_gets_the_numbers_of_all(kind: str, ranks: int) -> None:
    """Eagerly, and in a CUDA graph where the exchange stays on the device."""
    processes = start(kind, ranks, free_port(), ())
    assert [process.wait(300) for process in processes] == [0] * ranks


def test_two_ranks_on_one_card_answer_as_transformers_does() -> None:
    """Both workers are groups of two, which exchange over Gloo where the machine has one card."""
    degrees = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "512", *degrees)
    prompts = reference.prompts()[:30:5]
    with running_stack(*flags) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=2))
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "exchange",
    ["gloo", pytest.param("nccl", marks=needs_two), pytest.param("peers", marks=needs_two)],
)
def test_adapters_in_groups_of_two_are_merged_weights(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two adapters and of the base share steps, which over Gloo are not recorded; adapters come and
    go.
    """
    monkeypatch.setenv("DIPTYCH_GROUP_EXCHANGE", exchange)
    model = Model(tmp_path)
    degrees = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
    flags = ("--model", str(model.folder), "--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "512")
    with running_stack(*flags, *degrees, *model.flags) as stack:
        served = Adapted(stack, model.folder, model.adapters)
        check_all(served)
        change_adapters(served)
        stack.wait_idle()


def answers_of_experts(folder: Path, prefill: int, decode: int) -> None:
    """Ask two groups that send rows to their experts, and compare with transformers."""
    sizes = {**SHARED, "num_hidden_layers": 2}
    model = tiny_model.write(folder, config_class=Qwen2MoeConfig, **sizes)
    parts = max(prefill, decode)
    flags = ["--model", str(model), "--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "512"]
    for role, degree in (("prefill", prefill), ("decode", decode)):
        for flag, value in {"tensor-parallel": degree, "sum-parts": parts, **ALL_TO_ALL}.items():
            flags += ["--set", f"{role}.{flag}={str(value).lower() if value is True else value}"]
    with running_stack(*flags) as stack:
        answers = [answer(stack, prompt, EXPERT_TOKENS) for prompt in PROMPTS]
        stack.wait_idle()
    assert answers == [greedy(model, prompt) for prompt in PROMPTS]


def test_two_ranks_on_one_card_send_rows_to_experts(tmp_path: Path) -> None:
    """The host counts the rows of every step."""
    answers_of_experts(tmp_path, 2, 2)


@needs_two
def test_two_cards_send_rows_to_experts_in_recorded_steps(tmp_path: Path) -> None:
    answers_of_experts(tmp_path, 1, 2)


def test_a_draft_model_beside_two_ranks_changes_no_token() -> None:
    """The bundled model drafts for itself, whole, in rank 0; blocks go whole, over tcp."""
    degrees = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "512", *degrees)
    drafts = ("--speculative-model", "bundled", "--speculative-tokens", "3")
    prompts = reference.prompts()[:30:5]
    with running_stack(*flags, *drafts) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=2))
        drafted, accepted = (
            stack.metric("decode", f"diptych_spec_decode_{name}_tokens_total")
            for name in ("draft", "accepted")
        )
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, TOKENS) for prompt in prompts]
    assert drafted / 2 < accepted <= drafted


@pytest.mark.parametrize("exchange", ["nccl", "peers"])
@needs_two
def test_two_cards_to_one_answer_as_transformers_does(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded decode steps hold the exchange of the decode worker's ranks."""
    monkeypatch.setenv("DIPTYCH_GROUP_EXCHANGE", exchange)
    degrees = ("--set", "prefill.sum-parts=2", "--set", "decode.tensor-parallel=2")
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "512", *degrees)
    prompts = reference.prompts()[:30:5]
    with running_stack(*flags) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4))
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, TOKENS) for prompt in prompts]
