"""The state of one attempt on the encode worker.

Its life:

1. RECEIVED  its pixels are here, and no rows were asked for yet.
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
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.protocol.messages import Key
from prefill_worker.encoder.gateway_stream import EncodeGatewayStream
from prefill_worker.request_images import ImageState


class EncodeState(enum.Enum):
    """The states of an attempt."""

    RECEIVED = "received"
    ASKED = "asked"
    SENT = "sent"
    ENDED = "ended"


TRANSITIONS: dict[EncodeState, frozenset[EncodeState]] = {
    EncodeState.RECEIVED: frozenset({EncodeState.ASKED, EncodeState.ENDED}),
    EncodeState.ASKED: frozenset({EncodeState.SENT, EncodeState.ENDED}),
    EncodeState.SENT: frozenset({EncodeState.ASKED, EncodeState.ENDED}),
    EncodeState.ENDED: frozenset(),
}


class InvalidEncodeTransition(RuntimeError):
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
    gateway: EncodeGatewayStream
    images: dict[bytes, ImageState]
    trace: tuple[str, str] | None = None
    state: EncodeState = EncodeState.RECEIVED
    asks: list[Ask] = field(default_factory=list)
    """Asks that are not answered, in order."""
    entered: dict[EncodeState, float] = field(
        default_factory=lambda: {EncodeState.RECEIVED: time.monotonic()}
    )
    begun: float | None = None
    """Time at which its first tile was encoded."""

    def move(self, to: EncodeState) -> None:
        """Change the state, here and nowhere else. Raises InvalidEncodeTransition."""
        if to not in TRANSITIONS[self.state]:
            raise InvalidEncodeTransition(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    def next_image(self) -> ImageState | None:
        """Return the first image that is asked for and not encoded."""
        images = (self.images[ask.digest] for ask in self.asks)
        return next((image for image in images if image.tiles is not None), None)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the phases that it went through."""
        end = self.entered.get(EncodeState.SENT, self.entered.get(EncodeState.ENDED, time.monotonic()))
        found = {"queue": (self.begun or end) - self.entered[EncodeState.RECEIVED]}
        if self.begun is not None:
            found["encode"] = end - self.begun
        return found

    def span(self, outcome: str) -> PhaseSpan:
        """Return the span `encode` of an ended attempt, with its phases."""
        start, end = self.entered[EncodeState.RECEIVED], self.entered[EncodeState.ENDED]
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
