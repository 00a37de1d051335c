"""Command line of the hosting program: the ways of sharing, and the flags of each worker behind its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SEPARATOR = "--"
"""Word before the flags of each worker: `-- prefill FLAG … -- decode FLAG …`."""
SHARING = r"turns|streams|partition(:[1-9]\d{0,3})?"
Kind = Literal["turns", "streams", "partition"]

ENGINE_FIELDS = (
    "model",
    "mmproj",
    "max_model_len",
    "dtype",
    "quantization",
    "block_size",
    "device",
    "backend",
    "kv_cache_dtype",
    "batch_invariant",
    "window_blocks",
    "sum_parts",
    "speculative_model",
)
"""Settings that make the engine what it is: the same for both workers of a process."""


@dataclass(frozen=True)
class Sharing:
    """Way in which the two phases share a GPU."""

    kind: Kind
    multiprocessors: int = 0
    """Multiprocessors of decode steps in a partition; 0: a quarter."""

    @classmethod
    def parse(cls, text: str) -> Sharing:
        """Read turns, streams, partition or partition:N. Raises ValueError."""
        if re.fullmatch(SHARING, text) is None:
            raise ValueError("must be turns, streams, partition or partition:N")
        kind, _, number = text.partition(":")
        return cls(kind, int(number or 0))  # type: ignore[arg-type]


def split_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the flags before the first separator, and those of each role behind one."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], {part[0]: part[1:] for part in parts[1:] if part}
