"""Conversations in ShareGPT's format: JSON, a list of `{"conversations": [{"from": …, "value": …}, …]}`.

The first human turn is the prompt. With a tokenizer at hand the answer that followed it gives the length of
ours, and what vLLM's and SGLang's benchmarks leave out of the file is left out here, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.fields import sendable
from diptych.bench.request import BenchRequest

_HUMAN = ("human", "user")
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens; the last of a prompt with its answer


def read_sharegpt(path: Path, output_len: int, tokenizer: Path | None) -> tuple[BenchRequest, ...]:
    """`tokenizer` is a `tokenizer.json`; without one all have `output_len`. Raises BadDataset."""
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise BadDataset(f"{path}: not ShareGPT's format: {error}") from None
    if not isinstance(records, list):
        raise BadDataset(f"{path}: not ShareGPT's format: no list of conversations")
    pairs = list(_pairs(path, records))
    if tokenizer is None:
        requests = [BenchRequest(prompt, output_len) for prompt, _ in pairs]
    else:
        requests = list(_as_long_as_theirs(pairs, tokenizer))
    if not requests:
        raise BadDataset(f"{path}: no conversation that begins with a question and its answer")
    return tuple(requests)


def _pairs(path: Path, records: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield each conversation's first human turn and the one after it; many begin in the midst of one."""
    for number, record in enumerate(records, start=1):
        try:
            yield from _first_pair(record["conversations"])
        except KeyError as error:
            raise BadDataset(f"{path}, conversation {number}: no {error}") from None
        except (TypeError, ValueError) as error:
            raise BadDataset(f"{path}, conversation {number}: {error}") from None


def _first_pair(turns: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for turn, answer in itertools.pairwise(turns):
        if turn["from"] not in _HUMAN or answer["from"] in _HUMAN:
            continue  # no request sends what these say
        asked, told = sendable(turn["value"], "value"), sendable(answer["value"], "value")
        if asked.strip() and told.strip():
            yield asked, told
            return


def _as_long_as_theirs(pairs: Sequence[tuple[str, str]], tokenizer: Path) -> Iterator[BenchRequest]:
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises no narrower one
        raise BadDataset(f"{tokenizer}: {error}") from None
    prompts = known.encode_batch_fast([prompt for prompt, _ in pairs])
    answers = known.encode_batch_fast([answer for _, answer in pairs], add_special_tokens=False)
    for (text, _), prompt, answer in zip(pairs, prompts, answers, strict=True):
        lengths = len(prompt.ids), len(answer.ids)
        if min(lengths) >= _SHORTEST and lengths[0] <= _LONGEST_PROMPT and sum(lengths) <= _LONGEST:
            yield BenchRequest(text, lengths[1])
