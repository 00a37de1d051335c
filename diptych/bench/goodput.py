"""Service levels: which answers were quick enough to count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.bench.request import Outcome


@dataclass(frozen=True)
class ServiceLevel:
    """Limits in milliseconds on one request; None does not bind. `e2el` is the time to the last output."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """A failed request meets none; an answer of one token has no TPOT and meets every limit on it."""
        if outcome.reply is None:
            return False
        seen = ((self.ttft, outcome.ttft), (self.tpot, outcome.tpot or 0.0), (self.e2el, outcome.latency))
        return all(limit is None or 1000 * seconds <= limit for limit, seconds in seen)


def parse_service_level(texts: Sequence[str]) -> ServiceLevel:
    """From "ttft:500", "tpot:50", "e2el:4000". Raises ValueError."""
    limits: dict[str, float] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or name not in ("ttft", "tpot", "e2el") or name in limits:
            raise ValueError(f"{text!r} is not one of ttft:MS, tpot:MS, e2el:MS, each given once")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {value!r} is not a number of milliseconds") from None
        if not limits[name] > 0:
            raise ValueError(f"{text!r}: a limit is positive")
    return ServiceLevel(**limits)
