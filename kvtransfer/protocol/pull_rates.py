"""Measured rates of computing and of pulling tokens, and the decisions by them; no clock is read."""

from __future__ import annotations

from typing import Literal

PullMode = Literal["auto", "always", "never"]
"""Rule by which pulls are made: where they pay, all of them, or none."""
FORGET = 0.9
"""Weight that earlier measurements keep with each new one of their kind."""
ASSUMED_COST = 0.1
"""Cost of a pulled token, in computed ones, before anything was measured."""
PROBE_EVERY = 16
"""Pulls that do not pay until one is made all the same: rates change, and only a pull measures them."""
FAILED_COST = 4.0
"""Cost of a token, in computed ones, that a failed pull counts as, and the most that any pull does: one that
was stopped for seconds must not outweigh all others."""
FORCED_COST = 0.9
"""Most that a token counts where all pulls are made."""
FORCED_DEADLINE_S = 10.0
"""Time that a pull has where all are made, whatever computing would take."""
LATE_FACTOR = 2.0
"""A pull that takes so many times as long as computing the tokens is late."""
LEAST_DEADLINE_S = 0.1
ASSUMED_DEADLINE_S = 1.0
"""Most that a pull may take before the first prompt was computed."""


class _Rate:
    """Seconds a token, of which later measurements count more, and large ones more than small ones."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self._seconds = FORGET * self._seconds + seconds
        self._tokens = FORGET * self._tokens + tokens

    @property
    def seconds_a_token(self) -> float | None:
        return self._seconds / self._tokens if self._tokens > 0 else None


class PullRates:
    """Rates of one prefill worker over all its peers."""

    def __init__(self, mode: PullMode = "auto") -> None:
        self._mode = mode
        self._compute, self._pull = _Rate(), _Rate()
        self._declined = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step."""
        if tokens > 0:
            self._compute.add(tokens, seconds)

    def pulled(self, tokens: int, seconds: float) -> None:
        """Record a pull of which all came."""
        self._pull.add(tokens, min(seconds, self._failed_s(tokens) or seconds))

    def failed(self, tokens: int) -> None:
        """Record a pull of so many tokens that was late or broke."""
        if seconds := self._failed_s(tokens):
            self._pull.add(tokens, seconds)

    def _failed_s(self, tokens: int) -> float | None:
        compute = self._compute.seconds_a_token
        return FAILED_COST * compute * tokens if compute else None

    @property
    def cost(self) -> float:
        """Cost of pulling a token, in tokens that are computed in the same time."""
        compute, pull = self._compute.seconds_a_token, self._pull.seconds_a_token
        return ASSUMED_COST if not compute or pull is None else pull / compute

    @property
    def expected_cost(self) -> float | None:
        """Cost of a token for the router, below 1 where pulls are made; None if they never are."""
        if self._mode == "auto":
            return self.cost
        return min(self.cost, FORCED_COST) if self._mode == "always" else None

    def pays(self) -> bool:
        """Return True if a pull is to be made, because it costs less than computing or to measure again."""
        if self._mode != "auto":
            return self._mode == "always"
        if self.cost < 1:
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % PROBE_EVERY == 0

    def deadline_s(self, tokens: int) -> float:
        """Return the seconds after which a pull of so many tokens is given up."""
        if self._mode == "always":
            return FORCED_DEADLINE_S
        compute = self._compute.seconds_a_token
        if compute is None:
            return ASSUMED_DEADLINE_S
        return max(LEAST_DEADLINE_S, LATE_FACTOR * compute * tokens)
