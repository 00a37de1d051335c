"""Messages of gateways about adapters: load one, forget one; each gets its answer when that is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from diptych.worker.v1 import work_pb2
from diptych.worker_process.adapter_store import AdapterNotLoaded, AdapterStore

log = logging.getLogger(__name__)


class Answers(Protocol):
    """The messages of a worker to one gateway that answer such calls."""

    def adapter_answer(self, answer: work_pb2.AdapterAnswer) -> None: ...


class AdapterCalls:
    """Carries out the calls of all gateways, on the event loop."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps weak references only

    def load(self, call: work_pb2.LoadAdapter, gateway: Answers) -> None:
        """Load an adapter and answer."""
        self._begin(self._store.load(call.digest, Path(call.path)), call.id, call.name, gateway)

    def unload(self, call: work_pb2.UnloadAdapter, gateway: Answers) -> None:
        """Forget an adapter and answer, once no attempt uses it."""
        self._begin(self._store.unload(call.digest), call.id, call.digest.hex()[:12], gateway)

    def _begin(self, work: Awaitable[None], number: int, name: str, gateway: Answers) -> None:
        task = asyncio.create_task(self._answer(work, number, name, gateway), name=f"adapter {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, work: Awaitable[None], number: int, name: str, gateway: Answers) -> None:
        answer = work_pb2.AdapterAnswer(id=number)
        try:
            await work
        except AdapterNotLoaded as error:
            log.warning("adapter %s is not loaded: %s", name, error)
            answer.failure.reason = work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED
            answer.failure.message = str(error)
        except Exception as error:
            log.exception("adapter %s is not loaded", name)
            answer.failure.reason = work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED
            answer.failure.message = f"{type(error).__name__}: {error}"
        gateway.adapter_answer(answer)
