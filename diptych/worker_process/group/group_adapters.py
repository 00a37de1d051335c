"""The adapters of a group, as rank 0 has them: prepared and placed by every rank.

    allowed  once, before the first step: every rank knows how many slots there are
    loaded   every rank has answered that it has its share; until then no attempt uses the adapter
    placed   in a slot, by an order among the plans of steps: the plan that names the slot comes after it
    dropped  by an order among the plans as well, once rank 0 has let go of it

A rank that cannot take an adapter fails its load for the worker, and every rank forgets it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass

from diptych.engine.adapters.adapter import Adapter, BadAdapter
from diptych.engine.backend import AdapterBackend, Backend
from diptych.worker_process.group.adapter_message import pickle_adapter
from diptych.worker_process.group.orders import (
    AdapterOrder,
    AllowAdapters,
    DropAdapter,
    LoadAdapter,
    PlaceAdapter,
)
from diptych.worker_process.group.rank_group import RankGroup


@dataclass(frozen=True, eq=False)
class _Everywhere:
    """An adapter that every rank has prepared."""

    number: int
    own: object
    """Rank 0's share."""


class GroupAdapters:
    """Adapters of all ranks; `own` computes rank 0's share of steps."""

    def __init__(self, own: Backend, group: RankGroup) -> None:
        self._backend, self._group = own, group
        self._numbers = itertools.count()
        self._placed: dict[int, object] = {}
        self._dropped: deque[int] = deque()

    def allow(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`; what is lacking may name the rank that lacks it."""
        if not isinstance(self._backend, AdapterBackend):
            return "adapters in parts are not computed by this backend"
        if (why := self._backend.allow_adapters(slots, max_rank)) is not None:
            return why
        return self._group.memories.ask(AllowAdapters(slots, max_rank))

    @property
    def _own(self) -> AdapterBackend:
        assert isinstance(self._backend, AdapterBackend), "adapters were not allowed"
        return self._backend

    def prepare(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: returns when every rank has its share.

        Raises BadAdapter, which names the rank that does not take it.
        """
        number = next(self._numbers)
        try:
            why = self._group.memories.ask(LoadAdapter(number, pickle_adapter(adapter)))
            if why is not None:
                raise BadAdapter(why)
            prepared = _Everywhere(number, self._own.prepare_adapter(adapter))
        except Exception:
            self._dropped.append(number)
            raise
        weakref.finalize(prepared, self._dropped.append, number).atexit = False
        return prepared

    def set(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`. An error ends the process: the ranks are out of step then."""
        assert prepared is None or isinstance(prepared, _Everywhere)
        try:
            self._send(PlaceAdapter(slot, None if prepared is None else prepared.number))
            self._own.set_adapter(slot, None if prepared is None else prepared.own)
            # As long as it lies in a slot it is not dropped.
            self._placed[slot] = prepared
            self.forget_dropped()
        except Exception as error:
            self._group.fail(error)

    def forget_dropped(self) -> None:
        """Have the ranks forget what rank 0 has let go of; call it before each step. Raises OSError."""
        while self._dropped:
            self._send(DropAdapter(self._dropped.popleft()))

    def _send(self, order: AdapterOrder) -> None:
        self._group.send_order(order)
