"""Capacity of the workers: reported sizes, KV memory that running requests will need, measured throughput.

**KV memory.** A request takes room for its prompt when it is computed, and more with every output token. Sent
to workers that cannot hold all of it, it is preempted later, or preempts others: work that is done twice, at
the time of the highest load. A request therefore counts from its admission with what it will probably hold at
its end: the prompt tokens that are not cached, and an output as long as its tenant's were on average, at most
`max_tokens`. All in whole blocks; choices share the full blocks of their prompt. The average may be wrong for
one request, which is what preemption is for: it needs to be rare, not impossible. Where several gateways send
to the same workers, each keeps within its quota (`gateway.admission.memory_quota`).

**Throughput.** Idle time is not measured, but ages what was measured before it: after eight seconds of it the
rate is unknown again. Workers that were slow, or whose clients left before any prefill was done, may be at
full speed by then, and nothing but work shows it.

Pure; times are seconds of a monotonic clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FIRST_GUESS_TOKENS = 256.0  # output length of a tenant without any output so far
SMOOTHING = 0.05  # weight of one output in the average
MEMORY_S = 3.0  # older measurements count less than a third
FIRST_S = 0.25  # prefills end in batches: a rate over less time than this means nothing


class Capacity(NamedTuple):
    """Load that the workers can take at once.

    ``kv_tokens`` is the KV memory of all decode workers, in blocks of ``block_size`` tokens; None: unknown.
    ``window``: further blocks that a sequence takes for each of its last blocks of tokens, and their number.
    """

    sequences: int
    prefill_workers: int
    kv_tokens: int | None = None
    block_size: int = 1
    window: tuple[int, int] = (0, 0)


class KvBudget:
    """KV memory reserved by the running requests of one gateway. Amounts are in tokens.

    `capacity` is the KV memory of all decode workers; None: unknown and unlimited. `quota` is the part of it
    that this gateway may use now, `attainable` what that may grow to while other gateways keep what they
    have; None: all.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.quota: int | None = None
        self.attainable: int | None = None
        self.reserved = 0
        self._block_size = 1
        self._window = 0, 0
        self._mean_output: dict[str, float] = {}  # by tenant

    def resize(self, capacity: int | None, block_size: int, window: tuple[int, int] = (0, 0)) -> None:
        """Set the capacity and the block size, both in tokens, and `Capacity.window`."""
        self.capacity = capacity
        self._window = window
        self._block_size = max(block_size, 1)

    def parts(self, prompt_tokens: int, max_tokens: int, tenant: str) -> tuple[int, int]:
        """Estimate the tokens of KV memory that a request's outputs share at their end, and each has alone.

        Args:
            prompt_tokens: those to compute.
            max_tokens: bound of each output.
            tenant: whose average output length applies.
        """
        output = min(self._mean_output.get(tenant, FIRST_GUESS_TOKENS), max_tokens)
        shared, own = divmod(prompt_tokens, self._block_size)
        blocks = -int(-(own + output) // self._block_size)
        more, places = self._window
        blocks += more * min(shared + blocks, places)
        return shared * self._block_size, blocks * self._block_size

    def clipped(self, need: int) -> int:
        """Return ``need``, at most the capacity: a request that needs more runs alone."""
        return need if self.capacity is None else min(need, self.capacity)

    @property
    def usable(self) -> int | None:
        """Tokens that this gateway's requests may reserve; None: unlimited."""
        return _smaller(self.capacity, self.quota)

    def fits(self, need: int) -> bool:
        """Return whether a request that needs ``need`` tokens fits beside the running ones."""
        limit = self.usable
        return limit is None or self.reserved + need <= limit

    def excess(self, need: float) -> float:
        """Return by how many times ``need`` tokens more would exceed the attainable memory; 0 if they fit."""
        limit = _smaller(self.capacity, self.attainable)
        if not limit:
            return 0.0
        return max(self.reserved + need - limit, 0) / limit

    def reserve(self, need: int) -> None:
        self.reserved += need

    def release(self, need: int) -> None:
        self.reserved -= need

    def learn(self, tenant: str, output_tokens: float) -> None:
        """Update the tenant's average output length with one output."""
        mean = self._mean_output.get(tenant, output_tokens)
        self._mean_output[tenant] = mean + SMOOTHING * (output_tokens - mean)


def _smaller(capacity: int | None, part: int | None) -> int | None:
    return capacity if capacity is None or part is None else min(capacity, part)


class ThroughputEstimator:
    """Rate of work per second of busy time, as an average that decays."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0
        self._noted_at = 0.0
        self._busy = False

    @property
    def per_s(self) -> float | None:
        """Units per second; None until enough was measured."""
        return self._units / self._seconds if self._seconds >= FIRST_S and self._units else None

    def begin(self, now: float) -> None:
        """Note that there is work to do; no change if there was before."""
        if not self._busy:
            self._fade(now - self._noted_at)
            self._busy, self._noted_at = True, now

    def done(self, units: float, now: float, *, more: bool) -> None:
        """Add finished work. ``more``: work is left."""
        elapsed = max(now - self._noted_at, 0.0) if self._busy else 0.0
        self._fade(elapsed)
        self._units += units
        self._seconds += elapsed
        self._busy, self._noted_at = more, now

    def skip(self, now: float) -> None:
        """Leave the time until ``now`` out: there were no workers, so it says nothing about those of now."""
        if not self._busy:
            self._fade(now - self._noted_at)
        self._noted_at = now

    def pause(self, now: float) -> None:
        """Note that no worker can do what is left of the work: the time until `begin` does not count."""
        self.skip(now)
        self._busy = False

    def _fade(self, elapsed: float) -> None:
        kept = math.exp(-max(elapsed, 0.0) / MEMORY_S)
        self._units *= kept
        self._seconds *= kept
