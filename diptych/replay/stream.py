"""Request on its way through the replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.admission.ticket import Ticket
from prefill_worker.scheduler import Prompt


@dataclass(slots=True, eq=False)
class Stream:
    """A request. Chunks of `used` hold tokens at its decode worker; its own blocks hold the others."""

    number: int
    arrival_s: float
    input: int
    output: int
    chain: tuple[int, ...] = ()
    """Ids of the prompt's whole chunks."""
    ticket: Ticket | None = field(default=None, repr=False)
    prefill: int | None = None
    """Prefill worker that was chosen; None: the decode worker computes the prompt."""
    remote: bool = False
    """True once a decode worker found too many new tokens to compute them itself."""
    decode: int = -1
    tokens: int = 0
    """Tokens of the attempt's prompt: after a preemption with the answer so far."""
    made: int = 0
    """Tokens of the answer so far."""
    used: Sequence[int] = ()
    """Chunks in use: granted, or published by it."""
    held: int = 0
    """Own blocks."""
    start: int = 0
    """Tokens of the prompt that were cached at the grant."""
    left: int = 0
    """Tokens of the prompt that are still to be computed."""
    pulled: bool = False
    begun_s: float | None = None
    """Virtual time of the begin of its prompt's first step."""
    first_s: float | None = None
    order: int = 0
    """Place in line at its decode worker."""
    joined_step: int = 0
    prompt: Prompt | None = field(default=None, repr=False)

    @property
    def remaining(self) -> int:
        """Tokens of the answer that decode steps still have to make."""
        return self.output - self.made
