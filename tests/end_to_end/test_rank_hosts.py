"""Groups whose ranks share no memory: the tokens of one process with the same parts, and one life for all.

Where this machine lets network namespaces be made, the full form has every rank in one of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, MixtralConfig

from decode_worker.config import DecodeSettings
from diptych.client import Client
from diptych.runtime.settings_sources import BadSettings
from tests.end_to_end import tiny_model
from tests.end_to_end.rank_hosts import children, kill_rank, serving_across_hosts
from tests.end_to_end.rank_processes import GREEDY, Degrees, alone, answer, processes
from tests.end_to_end.ray_nodes import may_make_namespaces, network_nodes
from tests.end_to_end.stack import Stack
from tests.end_to_end.test_expert_parallel import EXPERTS, LATENT

pytestmark = pytest.mark.timeout(900)
TOKENS = 24
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
ONE_KV_HEAD = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]
PULLS = ("--set", "prefill.pull-prefixes=always")


def tp(tensor: int, pipeline: int = 1, **more: Any) -> Degrees:
    return {"tensor-parallel": tensor, "pipeline-parallel": pipeline, **more}


def resumed_after(stack: Stack, prompt: list[int], parent: int) -> list[int]:
    """Return the tokens of a stream in the middle of which the rank of `parent` is killed."""
    tokens: list[int] = []
    with Client(stack.address, retries=0) as client:
        for chunk in client.stream(prompt, max_tokens=TOKENS, timeout_s=300, **GREEDY):
            if len(tokens) < 8 <= len(tokens) + len(chunk.token_ids):
                kill_rank(parent)
            tokens += chunk.token_ids
    return tokens


def test_two_ranks_without_common_memory_are_one_process_and_live_as_one(tmp_path: Path) -> None:
    """Uneven heads; blocks are sent, pulled back by the prefill worker, and copied between two choices."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    drafting = tp(2, **{"speculative-tokens": 3})
    with serving_across_hosts(model, tp(2), drafting, tmp_path, *PULLS) as (stack, parents):
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert "transport tcp between 2 ranks there and those here" in stack.log.read_text()
        longer = [*PROMPTS[2], *expected[2], 7, 9]
        (after,) = alone(model, 2, [longer], TOKENS, backend="torch")
        assert answer(stack, longer, TOKENS) == after
        assert stack.metric("prefill", "diptych_kv_pulled_tokens_total") >= 16
        with Client(stack.address, retries=0) as client:
            found = client.generate(PROMPTS[1], max_tokens=TOKENS, n=2, timeout_s=300, **GREEDY)
        assert [list(choice.token_ids) for choice in found.choices] == [expected[1]] * 2
        before = [processes(stack, "decode"), children(parents[1])]
        assert resumed_after(stack, PROMPTS[2], parents[1]) == expected[2]
        stack.wait_idle(120)
        for old, new in zip(before, [processes(stack, "decode"), children(parents[1])], strict=True):
            assert new
            assert not {*old} & {*new}


@pytest.mark.full
@pytest.mark.parametrize("sizes", [ODD, ONE_KV_HEAD], ids=["odd", "one-kv-head"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(tp(1), tp(2)), (tp(2), tp(1)), (tp(3), tp(1)), (tp(2), tp(3)), (tp(2, 2), tp(1, 2))],
    ids=["1-2", "2-1", "3-1", "2-3", "2x2-1x2"],
)
def test_any_degree_to_any_other_is_one_process(
    tmp_path: Path, prefill: Degrees, decode: Degrees, sizes: dict[str, int]
) -> None:
    model = tiny_model.write(tmp_path, **sizes)
    parts = 6 if decode["tensor-parallel"] == 3 else 3 if prefill["tensor-parallel"] == 3 else 2
    expected = alone(model, parts, PROMPTS, TOKENS, backend="torch")
    with serving_across_hosts(model, prefill, decode, tmp_path) as (stack, parents):
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        for parent in parents:
            assert resumed_after(stack, PROMPTS[2], parent) == expected[2]
            stack.wait_idle(120)


@pytest.mark.full
def test_a_draft_model_beside_ranks_of_other_hosts_changes_no_token(tmp_path: Path) -> None:
    """Rank 0 has its keys and values, which go with whole blocks; the model drafts for itself."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    drafting = {"speculative-model": str(model)}
    decode = tp(2, **drafting, **{"speculative-tokens": 3})
    with serving_across_hosts(model, tp(2, **drafting), decode, tmp_path, *PULLS) as (stack, _):
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        drafted, accepted = (
            stack.metric("decode", f"diptych_spec_decode_{name}_tokens_total")
            for name in ("draft", "accepted")
        )
        assert drafted / 2 < accepted <= drafted


@pytest.mark.full
def test_two_ranks_here_and_two_elsewhere_compute_experts(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path, config_class=MixtralConfig, num_key_value_heads=4, **EXPERTS)
    expected = alone(model, 4, PROMPTS, TOKENS, whole_experts=True)
    four, two = tp(4, **{"expert-parallel": True}), tp(2, **{"expert-parallel": True})
    remote = {"prefill": 2, "decode": 1}
    with serving_across_hosts(model, four, two, tmp_path, remote=remote) as (stack, _):
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected


@pytest.mark.full
def test_latents_go_to_ranks_without_common_memory(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path, config_class=DeepseekV3Config, **LATENT)
    expected = alone(model, 2, PROMPTS, TOKENS)
    with serving_across_hosts(model, tp(2), tp(2), tmp_path) as (stack, _):
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected


@pytest.mark.full
@pytest.mark.skipif(not may_make_namespaces(), reason="no network namespaces can be made here")
def test_a_host_that_falls_silent_is_left_and_comes_back(tmp_path: Path) -> None:
    """Ranks in namespaces of their own. The link to one is cut, which no process is told of."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    with network_nodes(1) as (node,):
        elsewhere, bridge = node.command(), "10.213.7.1"
        with serving_across_hosts(model, tp(2), tp(2), tmp_path, host=bridge, elsewhere=elsewhere) as (
            stack,
            _,
        ):
            assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
            before = {*processes(stack, "prefill"), *processes(stack, "decode")}
            link = ["ip", "-n", node.name, "link", "set", "eth0"]
            subprocess.run([*link, "down"], check=True)
            until = time.monotonic() + 120
            while before & {*processes(stack, "prefill"), *processes(stack, "decode")}:
                assert time.monotonic() < until
                time.sleep(0.2)
            subprocess.run([*link, "up"], check=True)
            assert answer(stack, PROMPTS[1], TOKENS) == expected[1]


@pytest.mark.full
def test_a_stopped_rank_on_another_host_is_left_like_a_worker(tmp_path: Path) -> None:
    """It answers the kernel's probes, and computes nothing: the step is late."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    two = "--decode-workers", "2"
    with serving_across_hosts(model, tp(2), tp(2), tmp_path, *two, remote={"prefill": 1, "decode": 0}) as (
        stack,
        parents,
    ):
        assert answer(stack, PROMPTS[0], TOKENS) == expected[0]
        (rank,) = children(parents[0])
        os.kill(rank, signal.SIGSTOP)
        try:
            assert answer(stack, PROMPTS[2], TOKENS) == expected[2]
        finally:
            os.kill(rank, signal.SIGCONT)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let settings come from flags alone."""
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        monkeypatch.delenv(name)


WHOLE = ("--tensor-parallel", "2", "--remote-ranks", "1")
MEETING = ("--rendezvous", "10.0.0.1:7000", "--rank-key-file", "/key")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--remote-ranks", "1"), "--remote-ranks 1: this worker has 1 processes"),
        (WHOLE, "needs --rendezvous and --rank-key-file"),
        (("--tensor-parallel", "2", *MEETING), "for ranks on other hosts"),
        (("--rendezvous", "10.0.0.1"), "must be HOST:PORT"),
        ((*WHOLE, *MEETING, "--transport", "shared_memory"), "--transport shared_memory does not reach"),
        ((*WHOLE, *MEETING, "--kv-tier", "ram:1g"), "--kv-tier ram:1g"),
    ],
)
def test_what_ranks_of_other_hosts_cannot_do_is_refused_by_name(
    flags: tuple[str, ...], named: str, no_variables: None
) -> None:
    with pytest.raises(BadSettings) as refused:
        DecodeSettings.read_argv(flags)
    assert named in str(refused.value.faults[0])
