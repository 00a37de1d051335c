"""Workers of several processes: any degree to any degree, the same tokens as one process with the same parts.

The tiny models have odd heads: 3 KV heads for 6 query heads, which two parts divide unevenly, and one KV head
for more ranks than that.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.runtime.settings_sources import BadSettings
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.group_tiers import LOADED, wait_stored
from tests.end_to_end.rank_processes import alone, answer, processes, resumed, serving

TOKENS = 24
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
ONE_KV_HEAD = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}
TP = {degree: {"tensor-parallel": degree} for degree in (1, 2, 3)}
SPOKEN = ("draft", "accepted")
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.full)])
def test_two_ranks_to_two_are_one_process_and_a_stream_outlives_a_rank(tmp_path: Path, backend: str) -> None:
    """Uneven heads, tokens drafted from the text; rank 1 dies, which is not the process that holds the links.

    The last prompt has its own answer in it, so that some drafts are right. The next life of the group finds
    blocks on the disk.
    """
    model = tiny_model.write(tmp_path, **ODD)
    (told,) = alone(model, 2, [PROMPTS[1]], TOKENS, backend=backend)
    prompts = [*PROMPTS, [*PROMPTS[1], *told, *PROMPTS[1]]]
    expected = alone(model, 2, prompts, TOKENS, backend=backend)
    drafting, tier = {**TP[2], "speculative-tokens": 3}, ("--kv-tier", f"disk:{tmp_path / 'kv'}:64m")
    with serving(model, TP[2], drafting, backend=backend, flags=tier) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in prompts] == expected
        drafted, accepted = (stack.metric("decode", f"diptych_spec_decode_{n}_tokens_total") for n in SPOKEN)
        assert 0 < accepted <= drafted
        wait_stored(tmp_path / "kv", sum((len(prompt) + TOKENS - 1) // 16 for prompt in PROMPTS))
        before = processes(stack, "decode")
        assert resumed(stack, PROMPTS[2], TOKENS, victim=1) == expected[2]
        stack.wait_idle(120)
        assert not {*before} & {*processes(stack, "decode")}
        assert answer(stack, PROMPTS[1], TOKENS) == expected[1]
        assert stack.metric("decode", LOADED) > 0


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_draft_model_beside_two_ranks_changes_no_token(
    tmp_path: Path, backend: str, transport: str
) -> None:
    """The model drafts for itself, whole, in rank 0: its drafts are right where its keys and values are."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS, backend=backend)
    drafting = {**TP[2], "speculative-model": str(model)}
    with serving(model, drafting, {**drafting, "speculative-tokens": 3}, transport, backend=backend) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        drafted, accepted = (stack.metric("decode", f"diptych_spec_decode_{n}_tokens_total") for n in SPOKEN)
        assert drafted / 2 < accepted <= drafted
        assert resumed(stack, PROMPTS[2], TOKENS, victim=1) == expected[2]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [ODD, ONE_KV_HEAD], ids=["odd", "one-kv-head"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (3, 1), (2, 3)])
def test_any_degree_to_any_other_is_one_process(
    tmp_path: Path, prefill: int, decode: int, transport: str, sizes: dict[str, int]
) -> None:
    model = tiny_model.write(tmp_path, **sizes)
    expected = alone(model, 6 if decode == 3 else max(prefill, decode), PROMPTS, TOKENS)
    with serving(model, TP[prefill], TP[decode], transport) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert stack.metric("prefill", "diptych_kv_transfer_duration_seconds_count") >= len(PROMPTS)
        for victim in range(decode):
            assert resumed(stack, PROMPTS[2], TOKENS, victim) == expected[2]
            stack.wait_idle(120)


@pytest.mark.full
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_the_bundled_model_at_any_degree_is_one_process(prefill: int, decode: int) -> None:
    """Nine query heads, three KV heads."""
    model = reference.model_file()
    prompts = [list(reference.prompts()[index]) for index in (5, 12, 21)]
    expected = alone(model, max(prefill, decode), prompts, TOKENS)
    with serving("bundled", TP[prefill], TP[decode]) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in prompts] == expected
        assert resumed(stack, prompts[2], TOKENS, victim=decode - 1) == expected[2]


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let settings come from flags alone."""
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tensor-parallel", "2", "--quantization", "gguf"), "--quantization gguf"),
        (("--tensor-parallel", "2", "--sum-parts", "3"), "--sum-parts 3 is no multiple"),
        (("--tensor-parallel", "2", "--transport", "gloo"), "--transport gloo"),
        (("--tensor-parallel", "2", "--device", "cuda", "--backend", "torch"), "--backend torch computes on"),
        (("--sum-parts", "2", "--kv-cache-dtype", "fp8", "--backend", "torch"), "--kv-cache-dtype fp8"),
        (("--pipeline-parallel-size", "2", "--device", "cuda", "--batch-invariant"), "--batch-invariant"),
        (("--pipeline-parallel", "2", "--transport", "gloo"), "--transport gloo"),
        (("--pipeline-parallel", "9", "--tensor-parallel", "8"), "more than 64 processes"),
        (("--enable-expert-parallel",), "--expert-parallel deals experts to the parts"),
    ],
)
def test_what_does_not_work_with_groups_is_refused_by_name(
    flags: tuple[str, ...], named: str, no_variables: None
) -> None:
    with pytest.raises(BadSettings) as refused:
        DecodeSettings.read_argv(flags)
    assert named in str(refused.value.faults[0])
