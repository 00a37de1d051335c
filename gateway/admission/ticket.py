"""Place of one request in the admission queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.access.access import DEFAULT_TENANT


@dataclass(slots=True, eq=False)
class Ticket:
    """Place of one request in the queue.

    Attributes:
        sequences: outputs of the request; those that run now are in ``running``, with the times of their
            starts.
        together: its sequences step together (a beam search), and start and end together.
        shared_kv, own_kv: tokens of KV memory that it probably holds at its end, for its prompt and for each
            sequence.
        kv_tokens: of these, reserved now.
        queued_kv: tokens counted as waiting while it is queued.
        stalled: no worker can take it now; see `AdmissionQueue.stall`.
        has_stalled: it was so at some time.
        given: its sequences with the times of their starts, while others have their places and memory.
        returned: they have taken them back.
    """

    tokens: int
    priority: int
    sequences: int = 1
    tenant: str = DEFAULT_TENANT
    together: bool = False
    shared_kv: int = 0
    own_kv: int = 0
    kv_tokens: int = 0
    queued_kv: int = 0
    started: int = 0
    prefilled: bool = False
    over: bool = False
    stalled: bool = False
    has_stalled: bool = False
    returned: bool = False
    running: dict[int, float] = field(default_factory=dict, repr=False)
    given: dict[int, float] | None = field(default=None, repr=False)
    _announced: int = field(default=0, repr=False)

    @property
    def admitted(self) -> bool:
        """True once a sequence may run."""
        return self.started > 0

    @property
    def extras(self) -> int:
        """Running sequences but for the first one."""
        return 0 if self.together else max(len(self.running) - 1, 0)

    def take_admitted(self) -> tuple[int, ...]:
        """Return the indices of the sequences that were admitted since the last call."""
        first, self._announced = self._announced, self.started
        return tuple(range(first, self.started))
