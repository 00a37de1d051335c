"""Result of a load of blocks from tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Loaded:
    """Leading blocks that came, by tier, and the seconds that were waited for them."""

    blocks: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
