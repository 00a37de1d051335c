"""Groups on one host whose ranks have KV memories of their own, as on GPUs: the tokens of one process.

Memories are of the host here, and torch computes. What only a GPU has is not tried.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, MixtralConfig, Qwen2MoeConfig

from diptych.client import Client
from tests.end_to_end import tiny_model
from tests.end_to_end.group_tiers import LOADED, wait_stored
from tests.end_to_end.rank_processes import GREEDY, Degrees, alone, answer, processes, resumed, serving
from tests.end_to_end.stack import Stack
from tests.end_to_end.test_expert_parallel import ALL_TO_ALL, EXPERTS, LATENT, SHARED
from tests.end_to_end.test_rank_hosts import ODD, ONE_KV_HEAD, PROMPTS, TOKENS
from tests.forms import sampled

pytestmark = pytest.mark.timeout(900)
_BLOCKS = 96
_ROW_BYTES = 16 * 16 * 4
"""Size of one head's keys, or values, in one layer's block: head_dim times tokens, in fp32."""


def own(tensor: int, pipeline: int = 1, **more: Any) -> Degrees:
    return {"tensor-parallel": tensor, "pipeline-parallel": pipeline, "own-memories": True, **more}


def pool_bytes(pid: int) -> int:
    """Return the bytes of the KV pool that a process maps."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:diptych-kv" in line and (ends := re.match(r"(\w+)-(\w+) ", line)):
            found += int(ends[2], 16) - int(ends[1], 16)
    return found


def test_each_rank_holds_its_share_and_all_are_one_process(tmp_path: Path) -> None:
    """Uneven heads, and prefill ranks that compute in the decode ranks' memories; a cached prefix is read
    where it lies, blocks are copied between two choices; a killed rank is the end of its group, and the next
    one finds its blocks on the disk.
    """
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    tier = ("--kv-tier", f"disk:{tmp_path / 'kv'}:64m")
    with serving(model, own(2), own(2), "auto", backend="torch", flags=tier) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        log = stack.log.read_text()
        assert "transport cuda_shared between 2 ranks there and those here" in log
        assert log.count("memory of rank 1 in MiB: weights") >= 2, "each worker says what its rank 1 holds"
        assert stack.metric("decode", "diptych_kv_transfer_bytes_total") == 0
        longer = [*PROMPTS[2], *expected[2], 7, 9]
        (after,) = alone(model, 2, [longer], TOKENS, backend="torch")
        assert answer(stack, longer, TOKENS) == after
        held = [pool_bytes(pid) for pid in processes(stack, "decode")]
        assert held == [_BLOCKS * 2 * 2 * heads * _ROW_BYTES for heads in (1, 2)]
        with Client(stack.address, retries=0) as client:
            found = client.generate(PROMPTS[1], max_tokens=TOKENS, n=2, timeout_s=300, **GREEDY)
        assert [list(choice.token_ids) for choice in found.choices] == [expected[1]] * 2
        wait_stored(tmp_path / "kv", sum((len(prompt) + TOKENS - 1) // 16 for prompt in PROMPTS))
        before = processes(stack, "decode")
        assert resumed(stack, PROMPTS[2], TOKENS, 1) == expected[2]
        stack.wait_idle(120)
        assert not {*before} & {*processes(stack, "decode")}
        assert answer(stack, PROMPTS[1], TOKENS) == expected[1]
        assert stack.metric("decode", LOADED) > 0


def drafted_and_accepted(stack: Stack) -> tuple[float, float]:
    """Return the tokens that decode workers drafted, and those of them that the model drew, too."""
    drafted, accepted = (f"diptych_spec_decode_{name}_tokens_total" for name in ("draft", "accepted"))
    return stack.metric("decode", drafted), stack.metric("decode", accepted)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    sampled([(2, 2), (1, 2), (2, 1), (4, 2)], ()),
)
def test_a_draft_model_in_rank_0_changes_no_token(tmp_path: Path, prefill: int, decode: int) -> None:
    """The model drafts for itself: drafts are right where its keys and values came with the blocks."""
    model = tiny_model.write(tmp_path, **{**ODD, "num_key_value_heads": 6} if prefill == 4 else ODD)
    parts = max(prefill, decode)
    expected = alone(model, parts, PROMPTS, TOKENS, backend="torch")
    both = {"speculative-model": str(model), "sum-parts": parts}
    drafting = own(decode, **both, **{"speculative-tokens": 3})
    pulling = own(prefill, **both, **{"pull-prefixes": "always"})
    with serving(model, pulling, drafting, "auto", backend="torch") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        drafted, accepted = drafted_and_accepted(stack)
        assert drafted / 2 < accepted <= drafted
        longer = [*PROMPTS[2], *expected[2], 7, 9]
        (after,) = alone(model, parts, [longer], TOKENS, backend="torch")
        assert answer(stack, longer, TOKENS) == after
        with Client(stack.address, retries=0) as client:
            found = client.generate(PROMPTS[1], max_tokens=TOKENS, n=2, timeout_s=300, **GREEDY)
        assert [list(choice.token_ids) for choice in found.choices] == [expected[1]] * 2
        drafted, accepted = drafted_and_accepted(stack)
        assert drafted / 2 < accepted <= drafted
        if prefill != decode > 1:
            assert resumed(stack, PROMPTS[2], TOKENS, 1) == expected[2]


@pytest.mark.full
@pytest.mark.parametrize("drafts", ["prefill", "decode"])
def test_a_draft_model_of_one_worker_alone_changes_no_token(tmp_path: Path, drafts: str) -> None:
    """Blocks go without its segment, from rank to rank where the decode worker has none."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    sides = {role: own(2) for role in ("prefill", "decode")}
    sides[drafts] = own(2, **{"speculative-model": str(model)})
    with serving(model, sides["prefill"], sides["decode"], "tcp", backend="torch") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected


@pytest.mark.full
def test_ranks_on_the_triton_step_draft_with_a_model(tmp_path: Path) -> None:
    """Both models compute as on GPUs, with the kernels in Triton's interpreter."""
    model = tiny_model.write(tmp_path, num_hidden_layers=2, max_position_embeddings=128)
    prompts = [tiny_model.prompt(0, 5), tiny_model.prompt(1, 60)]
    expected = alone(model, 2, prompts, 8, backend="torch")
    drafting = {"speculative-model": str(model)}
    decode = own(2, **drafting, **{"speculative-tokens": 3})
    with serving(model, own(2, **drafting), decode, "tcp", backend="triton") as stack:
        assert [answer(stack, prompt, 8) for prompt in prompts] == expected
        drafted, accepted = drafted_and_accepted(stack)
        assert drafted / 2 < accepted <= drafted


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes"), [(MixtralConfig, EXPERTS), (Qwen2MoeConfig, SHARED)], ids=["mixtral", "qwen2"]
)
def test_ranks_on_the_triton_step_send_rows_to_experts(
    tmp_path: Path, family: type[Any], sizes: dict[str, Any]
) -> None:
    """Over Gloo, with the kernels in Triton's interpreter."""
    sizes = {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 128}
    model = tiny_model.write(tmp_path, config_class=family, **sizes)
    prompts = [tiny_model.prompt(0, 5), tiny_model.prompt(1, 60)]
    expected = alone(model, 2, prompts, 8, whole_experts=True, all_to_all=True)
    with serving(model, own(2, **ALL_TO_ALL), own(2, **ALL_TO_ALL), "tcp", backend="triton") as stack:
        assert [answer(stack, prompt, 8) for prompt in prompts] == expected


@pytest.mark.full
def test_ranks_dealt_otherwise_copy_and_pull(tmp_path: Path) -> None:
    """Ranks map one another's memories; the prefill worker pulls back what it has not computed itself."""
    model = tiny_model.write(tmp_path, **ODD)
    (first,) = alone(model, 2, PROMPTS[2:], TOKENS, backend="torch")
    longer = [*PROMPTS[2], *first, 7, 9]
    (after,) = alone(model, 2, [longer], TOKENS, backend="torch")
    pulling = own(2, **{"pull-prefixes": "always"})
    with serving(model, pulling, own(1, 2), "auto", backend="torch") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in (PROMPTS[2], longer)] == [first, after]
        assert "transport cuda_ipc between 2 ranks there and those here" in stack.log.read_text()
        assert stack.metric("prefill", "diptych_kv_pulled_tokens_total") >= 16
        assert stack.metric("decode", "diptych_kv_transfer_bytes_total") > 0


@pytest.mark.full
def test_ranks_on_the_triton_step_are_one_process(tmp_path: Path) -> None:
    """Ranks compute as on GPUs, with the kernels in Triton's interpreter."""
    model = tiny_model.write(tmp_path, num_hidden_layers=2, max_position_embeddings=128)
    prompts = [tiny_model.prompt(0, 5), tiny_model.prompt(1, 60)]
    expected = alone(model, 2, prompts, 8, backend="torch")
    with serving(model, own(2), own(2), "tcp", backend="triton") as stack:
        assert [answer(stack, prompt, 8) for prompt in prompts] == expected


def check(stack: Stack, expected: list[list[int]]) -> None:
    assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
    assert resumed(stack, PROMPTS[2], TOKENS, 0) == expected[2]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("sizes", [ODD, ONE_KV_HEAD], ids=["odd", "one-kv-head"])
@pytest.mark.parametrize(
    ("prefill", "decode", "parts"),
    [
        (own(1), own(2), 2),
        (own(2), own(1), 2),
        (own(2), own(6), 6),
        (own(6), own(2), 6),
        (own(3), own(1), 3),
        (own(2, 2), own(2), 2),
        (own(1, 2), own(2, 2), 2),
    ],
    ids=["1-2", "2-1", "2-6", "6-2", "3-1", "2x2-2", "1x2-2x2"],
)
def test_any_degree_to_any_other_is_one_process(
    tmp_path: Path, prefill: Degrees, decode: Degrees, parts: int, sizes: dict[str, int], transport: str
) -> None:
    """Ranks map one another's memories where both workers are groups and no transport is named."""
    model = tiny_model.write(tmp_path, **sizes)
    expected = alone(model, parts, PROMPTS, TOKENS, backend="torch")
    with serving(model, prefill, decode, transport, backend="torch") as stack:
        check(stack, expected)


@pytest.mark.full
def test_four_ranks_and_two_are_one_process(tmp_path: Path) -> None:
    """The model has as many KV heads as the larger worker has ranks."""
    model = tiny_model.write(tmp_path, num_key_value_heads=4)
    expected = alone(model, 4, PROMPTS, TOKENS, backend="torch")
    for prefill, decode in ((own(2), own(4)), (own(4), own(2))):
        with serving(model, prefill, decode, "tcp", backend="torch") as stack:
            check(stack, expected)


@pytest.mark.full
def test_latents_are_held_by_every_rank(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path, config_class=DeepseekV3Config, **LATENT)
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    with serving(model, own(2), own(2), "tcp", backend="torch") as stack:
        check(stack, expected)
