"""The adapters of a rank, by the numbers that rank 0 gives them."""

from __future__ import annotations

import logging

from diptych.engine.adapters.adapter import BadAdapter
from diptych.engine.backend import AdapterBackend
from diptych.worker_process.group.adapter_message import unpickle_adapter
from diptych.worker_process.group.orders import (
    AdapterOrder,
    AdapterQuestion,
    AllowAdapters,
    LoadAdapter,
    PlaceAdapter,
    RankFailed,
)
from kvtransfer.transports.prefault import available_memory

_COPIES = 2
"""Copies of an adapter's numbers that preparing takes at most, beside the message itself."""
_log = logging.getLogger(__name__)


class RankAdapters:
    """Adapters that this rank has prepared. One thread loads them, that of its steps places them."""

    def __init__(self, backend: object) -> None:
        """Take what computes this rank's parts; rank 0 sends no adapter to one that computes none."""
        self._backend = backend
        self._prepared: dict[int, object] = {}

    def answer(self, order: AdapterQuestion) -> RankFailed | None:
        """Allow adapters, or prepare this rank's share of one; return why that fails."""
        if isinstance(order, LoadAdapter):
            return self._load(order)
        return self._allow(order)

    def _allow(self, order: AllowAdapters) -> RankFailed | None:
        if not isinstance(self._backend, AdapterBackend):
            return RankFailed("adapters in parts are not computed by this backend")
        why = self._backend.allow_adapters(order.slots, order.max_rank)
        return None if why is None else RankFailed(why)

    def _load(self, order: LoadAdapter) -> RankFailed | None:
        need, free = _COPIES * len(order.pickled), available_memory()
        if free is not None and need > free:
            return RankFailed(f"loading takes {need >> 20} MiB, and {free >> 20} MiB are free")
        try:
            prepared = self._own.prepare_adapter(unpickle_adapter(order.pickled))
        except (BadAdapter, RuntimeError, MemoryError) as error:
            _log.exception("an adapter is not loaded")
            return RankFailed(str(error) or repr(error))
        self._prepared[order.number] = prepared
        return None

    @property
    def _own(self) -> AdapterBackend:
        assert isinstance(self._backend, AdapterBackend), "adapters were not allowed"
        return self._backend

    def carry_out(self, order: AdapterOrder) -> None:
        """Place or forget an adapter, between two steps. Raises KeyError for one that was not loaded."""
        if isinstance(order, PlaceAdapter):
            prepared = None if order.number is None else self._prepared[order.number]
            self._own.set_adapter(order.slot, prepared)
        else:
            self._prepared.pop(order.number, None)  # none where its load failed
