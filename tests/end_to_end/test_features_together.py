"""Features that were built apart, in one system: a draft model or head, adapters, tiers, grammars and tcp.

Every text is transformers' own, whatever else goes on in the step, the block or the tier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from diptych.client import Client
from tests.adapters import write_adapter
from tests.end_to_end import knowing_head, tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_adapters import MAX_TOKENS, MODEL, SERVED, A, Adapted, B, ids_of

BLOCKS = 40
LONG = 96
"""Tokens of a prompt: four of them with their answers fill the pool."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


DRAFTS = [
    ("shared_memory", "model"),
    pytest.param(("tcp", "model"), marks=pytest.mark.full),
    pytest.param(("tcp", "eagle"), marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=DRAFTS, ids=["model", "model-tcp", "eagle-tcp"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    transport, drafter = request.param
    drafts = folder = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    if drafter == "eagle":
        known = [tiny_model.prompt(seed, LONG) for seed in range(4)]
        drafts = knowing_head.write(tmp_path_factory.mktemp("drafts") / "head", folder, known, MAX_TOKENS)
    base = tiny_model.oracle(folder)
    root = tmp_path_factory.mktemp("adapters")
    paths = {
        A: write_adapter(root / "a", base, seed=1, rank=4),
        B: write_adapter(root / "b", base, seed=2, rank=8),
    }
    flags = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32", "--prefill-chunk", "48"]
    flags += ["--kv-blocks", str(BLOCKS), "--max-loras", "2", "--transport", transport]
    flags += ["--speculative-model", str(drafts), "--speculative-tokens", "3"]
    flags += ["--kv-tier", "ram:64m", "--kv-tier", f"disk:{tmp_path_factory.mktemp('tier')}:64m"]
    flags += [f"--lora={name}={path}" for name, path in paths.items()]
    with running_stack(*flags) as stack:
        yield Adapted(stack, folder, paths)
        stack.wait_idle()


def test_prompts_that_come_back_from_a_tier_are_continued_with_drafts_and_adapters(together: Adapted) -> None:
    """The pool holds four conversations; twelve come by turns, twice."""
    asked = [(name, tiny_model.prompt(seed, LONG)) for seed in range(4) for name in SERVED]
    cached = []
    for _ in range(2):
        for pair in asked:
            [answer] = together.ask([pair])
            assert ids_of(answer) == together.greedy(*pair)
            cached.append(answer.usage.cached_prompt_tokens)
    first, second = cached[: len(asked)], cached[len(asked) :]
    assert first == [0] * len(asked)
    assert min(second) >= LONG - 16, "a tier brings the blocks of the pool's last users back"
    assert together.stack.metric("decode", "diptych_kv_tier_blocks_loaded_total") > 0
    assert together.stack.metric("decode", "diptych_spec_decode_accepted_tokens_total") > 0


def test_all_at_once(together: Adapted) -> None:
    asked = [(name, tiny_model.prompt(100 + seed, LONG)) for seed in range(3) for name in SERVED]
    for pair, answer in zip(asked, together.ask(asked), strict=True):
        assert ids_of(answer) == together.greedy(*pair)


def test_a_grammar_holds_with_drafts_over_an_adapter(together: Adapted) -> None:
    with Client(together.stack.address) as client:
        for lora in (None, A):
            found = client.generate("n:", lora=lora, json_schema=SCHEMA, max_tokens=200, temperature=0.0)
            assert set(json.loads(found.text)) == {"n"}
