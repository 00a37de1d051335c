"""Made-up loads: random lengths, and groups of requests with a common prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass

from diptych.bench.datasets.token_source import ANY_TOKENS, TokenSource
from diptych.bench.request import BenchRequest


@dataclass(frozen=True)
class RandomLengths:
    """Lengths uniform in [n * (1 - range_ratio), n * (1 + range_ratio)], as in vLLM's `random` dataset.

    Every prompt is its own: nothing to share, so no prefix cache can help.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    tokens: TokenSource = ANY_TOKENS
    name: str = "random"
    size: int | None = None

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        rng = random.Random(seed)
        made = []
        for index in range(count):
            prompt = self.tokens.draw(_around(self.input_len, self.range_ratio, rng), seed, index)
            made.append(BenchRequest(prompt, _around(self.output_len, self.range_ratio, rng)))
        return made


@dataclass(frozen=True)
class SharedPrefix:
    """`groups` prefixes of `prefix_len` tokens, each continued by random suffixes of `suffixes`' lengths.

    Requests of all groups come mixed, in an order that the seed decides.
    """

    prefix_len: int
    groups: int
    suffixes: RandomLengths
    name: str = "shared-prefix"
    size: int | None = None

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        prefixes = [
            # Offset, so that no prefix repeats the suffix that is drawn under the same number.
            self.suffixes.tokens.draw(self.prefix_len, seed, 1 << 32, group)
            for group in range(self.groups)
        ]
        order = [index % self.groups for index in range(count)]
        random.Random(seed).shuffle(order)
        return [
            BenchRequest((*prefixes[group], *_ids(suffix)), suffix.output_len)
            for group, suffix in zip(order, self.suffixes.requests(count, seed), strict=True)
        ]


def _ids(request: BenchRequest) -> tuple[int, ...]:
    if isinstance(request.prompt, str):
        raise TypeError("a suffix is made of token ids")
    return request.prompt


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))
