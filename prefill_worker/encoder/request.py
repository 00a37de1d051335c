"""The state of one attempt on the encode worker.

Its life:

1. RECEIVED  its pixels are here, and nobody has asked for rows.
2. ASKED     a prefill worker waits for rows of one of its images: they are encoded tile by tile.
3. SENT      all rows that were asked for are on their way; more may be asked for, or the same again.
4. ENDED     the prefill worker needs nothing more, or the attempt was cancelled, or failed.

Nothing here is ever written by another process, and nothing that is sent changes: what is forgotten at any
moment leaves nothing behind.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.runtime.telemetry import AttributeValue, PhaseSpan
from kvtransfer.drivers.embedding_server import RowsLink
from kvtransfer.protocol.messages import Key
from prefill_worker.encoder.gateway_stream import GatewayStream
from prefill_worker.request_images import ImageState


class State(enum.Enum):
    """The states of an attempt."""

    RECEIVED = "received"
    ASKED = "asked"
    SENT = "sent"
    ENDED = "ended"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RECEIVED: frozenset({State.ASKED, State.ENDED}),
    State.ASKED: frozenset({State.SENT, State.ENDED}),
    State.SENT: frozenset({State.ASKED, State.ENDED}),
    State.ENDED: frozenset(),
}


class InvalidTransition(RuntimeError):
    """A bug in the worker: an attempt was moved where it cannot go."""


class Ask(NamedTuple):
    """A prefill worker's wish for an image's rows."""

    link: RowsLink
    digest: bytes
    generation: int


@dataclass(slots=True, eq=False)
class EncodeRequest:
    """An attempt's images and what is asked of them."""

    key: Key
    gateway: GatewayStream
    images: dict[bytes, ImageState]
    trace: tuple[str, str] | None = None
    state: State = State.RECEIVED
    asks: list[Ask] = field(default_factory=list)
    """Those that are not answered, in order."""
    entered: dict[State, float] = field(default_factory=lambda: {State.RECEIVED: time.monotonic()})
    begun: float | None = None
    """When its first tile was encoded."""

    def move(self, to: State) -> None:
        """Change the state, here and nowhere else. Raises InvalidTransition."""
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    def next_image(self) -> ImageState | None:
        """Return the first image that is asked for and not encoded."""
        images = (self.images[ask.digest] for ask in self.asks)
        return next((image for image in images if image.tiles is not None), None)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the phases that it went through."""
        end = self.entered.get(State.SENT, self.entered.get(State.ENDED, time.monotonic()))
        found = {"queue": (self.begun or end) - self.entered[State.RECEIVED]}
        if self.begun is not None:
            found["encode"] = end - self.begun
        return found

    def span(self, outcome: str) -> PhaseSpan:
        """Return the span `encode` of an ended attempt, with its phases."""
        start, end = self.entered[State.RECEIVED], self.entered[State.ENDED]
        begun = end if self.begun is None else self.begun
        phases = [PhaseSpan("queue", start, begun)]
        if self.begun is not None:
            phases.append(PhaseSpan("encode", begun, end))
        attributes: dict[str, AttributeValue] = {
            "diptych.attempt": self.key[1],
            "diptych.outcome": outcome,
            "diptych.encode.images": len(self.images),
        }
        return PhaseSpan(
            "encode", start, end, attributes=attributes, key=f"encode/{self.key[1]}", children=tuple(phases)
        )
