"""Prompts of one's own: a text file with one prompt a line, or JSON lines.

A JSON line is an object with `prompt` (text) or `token_ids`, and optionally `output_len`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.fields import sendable, whole
from diptych.bench.datasets.token_source import MOST_TOKENS
from diptych.bench.request import BenchRequest


@dataclass(frozen=True)
class PromptsFile:
    """Prompts in an order that the seed decides, all of them before any comes again."""

    prompts: tuple[BenchRequest, ...]
    name: str = "prompts"

    @property
    def size(self) -> int | None:
        return len(self.prompts)

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        rng = random.Random(seed)
        chosen: list[BenchRequest] = []
        while len(chosen) < count:
            turn = list(self.prompts)
            rng.shuffle(turn)
            chosen += turn
        return chosen[:count]


def read_prompts(path: Path, output_len: int) -> tuple[BenchRequest, ...]:
    """`output_len` is for prompts that do not name their own. Raises BadDataset."""
    # By line ends alone: what else Python takes for one, U+2028 and its like, may stand within a JSON string.
    lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)
    numbered = [(number, line) for number, line in lines if line.strip()]
    if not numbered:
        raise BadDataset(f"{path}: no prompts")
    if path.suffix != ".jsonl":
        return tuple(BenchRequest(line, output_len) for _, line in numbered)
    requests = []
    for number, line in numbered:
        try:
            requests.append(_request(json.loads(line), output_len))
        except ValueError as error:
            raise BadDataset(f"{path}, line {number}: {error}") from None
    return tuple(requests)


def _request(record: Any, output_len: int) -> BenchRequest:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    text, ids = record.get("prompt"), record.get("token_ids")
    if (text is None) == (ids is None):
        raise ValueError("needs either 'prompt' or 'token_ids'")
    prompt = _ids(ids) if text is None else sendable(text, "prompt")
    wanted = whole(record.get("output_len", output_len), "output_len")
    if not prompt or wanted < 1:
        raise ValueError("an empty prompt, or an output_len below 1")
    return BenchRequest(prompt, wanted)


def _ids(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and all(type(one) is int and 0 <= one < MOST_TOKENS for one in value)):
        raise ValueError(f"'token_ids' must be a list of whole numbers from 0 to {MOST_TOKENS - 1}")
    return tuple(value)
