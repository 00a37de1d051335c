"""Which tokens may come and which are likelier: the whole system against plain loops over all tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import grpc
import pytest
import torch
from tokenizers import Tokenizer

from tests.end_to_end import tiny_model
from tests.end_to_end.tiny_system import PROMPTS, Served, tokens

STOPPING = {"max_tokens": 12, "min_tokens": 3}
GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    "rules",
    [
        {"logit_bias": {40: 4.0, 41: 5.0, 42: -100.0, 60: 6.0}},
        {"allowed_token_ids": [40, 41, 42, 60, 61, 99]},
        {
            "logit_bias": {40: 3.0, 41: 3.0, 60: 2.5},
            "allowed_token_ids": [40, 41, 42, 60, 61, 99, 120, 121],
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
        },
    ],
)
def test_biases_penalties_and_allowed_tokens(served: Served, rules: dict[str, Any]) -> None:
    free = answers(served, {})
    ruled = answers(served, rules)
    assert ruled == [by_hand(served, ids, rules, []) for ids in PROMPTS[:4]]
    assert ruled != free, "the rules should change something"


def test_bad_words_of_one_token_and_of_several(served: Served) -> None:
    for rules in ({}, {"repetition_penalty": 1.5, "logit_bias": {40: 3.0}}):
        free = answers(served, rules)
        words = words_in(served, free)
        ruled = answers(served, {**rules, "bad_words": words})
        assert ruled == [by_hand(served, ids, rules, spellings(served, words)) for ids in PROMPTS[:4]]
        assert ruled != free


def answers(served: Served, rules: dict[str, Any]) -> list[list[int]]:
    asked = served.ask(PROMPTS[:4], sampling=GREEDY | rules, stopping=STOPPING)
    return [tokens(answer)[0] for answer in asked]


def by_hand(
    served: Served, prompt: list[int], rules: dict[str, Any], words: Sequence[list[int]]
) -> list[int]:
    """Greedy under `rules`, one token of the vocabulary after the other."""
    repetition = rules.get("repetition_penalty", 1.0)
    output: list[int] = []
    ends = served.ends
    while len(output) < STOPPING["max_tokens"] and not set(ends) & set(output):
        before = [*prompt, *output]
        with torch.inference_mode():
            logits = tiny_model.oracle(served.folder)(torch.tensor([before])).logits[0, -1].tolist()
        best, highest = -1, -math.inf
        for token, logit in enumerate(logits):
            value = logit + rules.get("logit_bias", {}).get(token, 0.0)
            if token in before:
                value = value * repetition if value < 0 else value / repetition
            if token in output:
                value -= rules.get("presence_penalty", 0.0)
                value -= rules.get("frequency_penalty", 0.0) * output.count(token)
            banned = any([*before, token][-len(word) :] == word for word in words)
            unknown = "allowed_token_ids" in rules and token not in rules["allowed_token_ids"]
            too_early = token in ends and len(output) < STOPPING["min_tokens"]
            if not (banned or unknown or too_early) and value > highest:
                best, highest = token, value
        output.append(best)
    return output


def spellings(served: Served, words: Sequence[str]) -> list[list[int]]:
    """Each word in tokens of the library, as it begins a text and after a space."""
    tokenizer = Tokenizer.from_file(str(served.folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for word in words for text in (word, f" {word}")]


def words_in(served: Served, outputs: list[list[int]]) -> list[str]:
    """Words of one token and of two that are met in the outputs."""
    tokenizer = Tokenizer.from_file(str(served.folder / "tokenizer.json"))
    single = [ids for output in outputs for token in output if is_word(tokenizer, ids := [token])]
    double = [ids for output in outputs for pair in pairwise(output) if is_word(tokenizer, ids := list(pair))]
    assert single
    assert double
    return [tokenizer.decode(ids) for ids in (single[0], single[-1], double[0], double[-1])]


def is_word(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether the text of these tokens has these tokens."""
    text: str = tokenizer.decode(token_ids)
    return text.isprintable() and text.isascii() and tokenizer.encode(text).ids == token_ids


def test_rules_that_leave_nothing_are_the_callers_fault(served: Served) -> None:
    words = spellings(served, ["a"])
    (single,) = [word for word in words if len(word) == 1][:1]
    dead_end = {"allowed_token_ids": single, "bad_words": ["a"], "temperature": 0.0}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        served.ask(PROMPTS[:1], sampling=dead_end)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    # Two tokens that may come, and no order of them: known only when it happens.
    both = {"allowed_token_ids": single, "bad_words": ["aa"], "temperature": 0.0}
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        served.ask(PROMPTS[:1], sampling=both, stopping={"max_tokens": 8})
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    served.stack.wait_idle()
