"""Tiles that are kept in the package by card: measured on an H200, by arithmetic for the others.

Decode attention reads memory, so that a multiprocessor needs as many programs as keep its share of the
bandwidth on its way (Little's law): latency times bandwidth over multiprocessors, at least `_FLOOR` programs
and no more than an H200. Fewer programs mean fewer partial sums to join.

    H200       4.8 TB/s  / 132 = 36 GB/s: 16 programs, measured
    H100       3.35 TB/s / 132 = 25 GB/s: 11
    A100       2.0 TB/s  / 108 = 19 GB/s:  8
    L40S       0.86 TB/s / 142 =  6 GB/s:  4
    RTX 4090   1.0 TB/s  / 128 =  8 GB/s:  4

Prefill's tiles follow from the memory of a program (tuning.py), which a device tells. What `python -m
lab.gpu.tune` found on a machine goes before all of this.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOOR = 4


@dataclass(frozen=True)
class Card:
    """A card as its maker describes it."""

    name: str
    """Word in the name that the driver gives it."""
    bandwidth: float
    """Bytes a second."""
    multiprocessors: int
    program_memory: int
    """Bytes of shared memory that a program may have."""
    measured: bool = False

    @property
    def share(self) -> float:
        """Bytes a second of one multiprocessor."""
        return self.bandwidth / self.multiprocessors


H200 = Card("H200", 4.8e12, 132, 227 << 10, measured=True)
CARDS = (
    H200,
    Card("H100", 3.35e12, 132, 227 << 10),
    Card("A100", 2.0e12, 108, 163 << 10),
    Card("L40S", 0.864e12, 142, 99 << 10),
    Card("RTX 4090", 1.008e12, 128, 99 << 10),
)


def card_of(name: str) -> Card | None:
    """Return the card that the driver calls `name`; None for one that is not here."""
    return next((card for card in CARDS if card.name in name), None)


def decode_programs(name: str, on_h200: int) -> int:
    """Return the programs a multiprocessor of decode attention, of which an H200 runs `on_h200`.

    Cards that are not here run as many as an H200.
    """
    card = card_of(name)
    if card is None or card.measured:
        return on_h200
    return min(on_h200, max(_FLOOR, round(on_h200 * card.share / H200.share)))
