"""Accelerators and what they do at most, as their makers state it.

Operations are dense: makers often print twice that, for matrices half of which are zeros. Memory is the
label's, in decimal bytes, which is a little less than the driver reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

GB: Final = 1e9
TB: Final = 1e12
TFLOPS: Final = 1e12


@dataclass(frozen=True)
class Accelerator:
    """Limits of one card."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second that are read from memory."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Operations a second of dense matrix products, by the type of their operands: bf16, fp8, int8."""
    link: float = 32 * GB
    """Bytes a second to another card of the host, one way."""
    source: str = ""

    def flops_of(self, operands: str) -> float:
        """Return operations a second; without units for `operands` they are widened to bf16."""
        return self.flops.get(operands, self.flops["bf16"])


_DATA_SHEET = "https://www.nvidia.com/en-us/data-center/"
_CARDS: Final = (
    Accelerator(
        "h100",
        80 * GB,
        3.35 * TB,
        {"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS, "int8": 1979 * TFLOPS},
        450 * GB,
        f"{_DATA_SHEET}h100/ (SXM)",
    ),
    Accelerator(
        "h200",
        141 * GB,
        4.8 * TB,
        {"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS, "int8": 1979 * TFLOPS},
        450 * GB,
        f"{_DATA_SHEET}h200/ (SXM)",
    ),
    Accelerator(
        "b200",
        180 * GB,
        8.0 * TB,
        {"bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "int8": 4500 * TFLOPS},
        900 * GB,
        f"{_DATA_SHEET}dgx-b200/ (an eighth of a system)",
    ),
    Accelerator(
        "a100",
        80 * GB,
        2.039 * TB,
        {"bf16": 312 * TFLOPS, "int8": 624 * TFLOPS},
        300 * GB,
        f"{_DATA_SHEET}a100/ (SXM, 80 GB)",
    ),
    Accelerator(
        "l40s",
        48 * GB,
        0.864 * TB,
        {"bf16": 362 * TFLOPS, "fp8": 733 * TFLOPS, "int8": 733 * TFLOPS},
        source=f"{_DATA_SHEET}l40s/",
    ),
    Accelerator(
        "l4",
        24 * GB,
        0.3 * TB,
        {"bf16": 121 * TFLOPS, "fp8": 242 * TFLOPS, "int8": 242 * TFLOPS},
        source=f"{_DATA_SHEET}l4/",
    ),
    Accelerator(
        "a10",
        24 * GB,
        0.6 * TB,
        {"bf16": 125 * TFLOPS, "int8": 250 * TFLOPS},
        source=f"{_DATA_SHEET}products/a10-gpu/",
    ),
    Accelerator(
        "rtx4090",
        24 * GB,
        1.008 * TB,
        {"bf16": 165 * TFLOPS, "fp8": 330 * TFLOPS, "int8": 660 * TFLOPS},
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A (sums in FP32)",
    ),
)
ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType({card.name: card for card in _CARDS})


def find_accelerator(name: str, memory: float | None = None) -> Accelerator:
    """Return a card by name, with `memory` bytes if they are given. Raises ValueError, naming those known."""
    card = ACCELERATORS.get(name.lower().replace("-", "").replace(" ", ""))
    if card is None:
        raise ValueError(f"unknown card {name!r}; known are {', '.join(ACCELERATORS)}")
    return card if memory is None else replace(card, memory=memory)
