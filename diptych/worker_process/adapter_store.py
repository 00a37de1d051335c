"""The LoRA adapters in a worker's memory by their content, and the slots in which steps read them.

An adapter's life: LOADED from its files on a thread of its own; PLACED in a slot as long as attempts that
name it are computed; and forgotten once it is unloaded and no attempt uses it any more. Contents never
change: other bytes have another digest. One event loop owns all of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from diptych.engine.adapters.adapter import BadAdapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.runner import Runner
from diptych.runtime import adapter_files
from diptych.worker_process.slot_table import SlotTable
from kvtransfer.transports.prefault import available_memory

log = logging.getLogger(__name__)

COPIES = 3
"""Copies of an adapter's numbers that loading takes at most: as read, in float32, and as steps read them."""


class AdapterNotLoaded(Exception):
    """An adapter that this worker cannot load. The message names the path and what is at fault."""


@dataclass(slots=True, eq=False)
class _Loaded:
    prepared: object
    users: int = 0
    draining: list[asyncio.Future[None]] = field(default_factory=list)
    """Unloads that wait until no attempt uses it; nothing new uses it meanwhile."""


class AdapterStore:
    """Every adapter that this worker has, and its slots."""

    def __init__(self, runner: Runner, *, slots: int, max_rank: int) -> None:
        """Serve adapters of rank up to `max_rank`, at most `slots` in one step; 0 serves none."""
        self._runner = runner
        self._max_rank = max_rank
        self.why = "--max-loras is 0" if slots == 0 else runner.allow_adapters(slots, max_rank)
        """Reason, in words, why this worker computes no adapters; None if it does."""
        if self.why is not None and slots:
            log.warning("this worker computes no LoRA adapters: %s", self.why)
        self.max_loras = 0 if self.why is not None else slots
        """Adapters that one step can compute."""
        self.slots = SlotTable(self.max_loras)
        self.on_slot_free: Callable[[], None] = lambda: None
        """Called when an attempt has ended its use of an adapter: another one may take a slot."""
        self._loaded: dict[bytes, _Loaded] = {}
        self._loading: dict[bytes, asyncio.Task[object]] = {}
        self._thread = ThreadPoolExecutor(1, "adapter-loader", initializer=partial(torch.set_num_threads, 1))

    @property
    def digests(self) -> list[bytes]:
        """The adapters that new attempts may use."""
        return [digest for digest, one in self._loaded.items() if not one.draining]

    @property
    def num_uses(self) -> int:
        """Attempts that use an adapter, of all adapters together."""
        return sum(one.users for one in self._loaded.values())

    # ---- loading -------------------------------------------------------------------------------------

    async def load(self, digest: bytes, path: Path) -> None:
        """Load the adapter at `path`, whose content must have `digest`; one that is there is kept.

        One that is being unloaded stays. Raises AdapterNotLoaded.
        """
        if self.why is not None:
            raise AdapterNotLoaded(f"this worker computes no LoRA adapters: {self.why}")
        if (there := self._loaded.get(digest)) is not None:
            _finish(there)
            return
        task = self._loading.get(digest)
        if task is None:
            task = self._loading[digest] = asyncio.create_task(self._load(digest, path))
        await asyncio.shield(task)

    async def _load(self, digest: bytes, path: Path) -> object:
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(self._thread, self._read, digest, path)
            self._loaded[digest] = _Loaded(prepared)
            return prepared
        finally:
            del self._loading[digest]

    def _read(self, digest: bytes, path: Path) -> object:
        """Return the adapter as the backend takes it; runs on a thread of its own."""
        try:
            self._check_room(path)
            _check_digest(digest, path)
            adapter = read_adapter(path, self._runner.model.shape, self._max_rank)
            _check_digest(digest, path)  # the files that were read are those that were asked for
            prepared = self._runner.prepare_adapter(adapter)
        except adapter_files.BadAdapter as error:
            raise AdapterNotLoaded(str(error)) from None  # names its path
        except (BadAdapter, OSError) as error:
            raise AdapterNotLoaded(f"{path}: {error}") from None
        log.info("loaded the adapter at %s: rank %d, %d KiB", path, adapter.rank, adapter.num_bytes >> 10)
        return prepared

    def _check_room(self, path: Path) -> None:
        """Raise AdapterNotLoaded where memory is short: others, and the model, stay as they are."""
        files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
        need, free = COPIES * sum(one.stat().st_size for one in files if one.exists()), available_memory()
        if free is not None and need > free:
            raise AdapterNotLoaded(f"{path}: loading takes {need >> 20} MiB, and {free >> 20} MiB are free")

    async def unload(self, digest: bytes) -> None:
        """Forget an adapter: return once no attempt uses it any more, or a `load` takes this back."""
        if (task := self._loading.get(digest)) is not None:
            await asyncio.wait([task])
        there = self._loaded.get(digest)
        if there is None:
            return
        waiter = asyncio.get_running_loop().create_future()
        there.draining.append(waiter)
        self._forget_unused(digest)
        await waiter

    def _forget_unused(self, digest: bytes) -> None:
        there = self._loaded[digest]
        if there.users or not there.draining:
            return
        del self._loaded[digest]
        if (slot := self.slots.evict(digest)) is not None:
            self._runner.place_adapter(slot, None)
        _finish(there)

    # ---- use -----------------------------------------------------------------------------------------

    def use(self, holder: Hashable, digest: bytes) -> AdapterUse | None:
        """Begin the use of an adapter by an attempt; None if it is not loaded. It has no slot yet."""
        there = self._loaded.get(digest)
        if there is None or there.draining:
            return None
        there.users += 1
        return AdapterUse(self, holder, digest)

    def place(self, holder: Hashable, digest: bytes) -> int:
        """Give the first in line a slot, and return its number."""
        slot, fresh = self.slots.take(holder)
        if fresh:
            self._runner.place_adapter(slot, self._loaded[digest].prepared)
        return slot

    def end(self, holder: Hashable, digest: bytes, slot: int | None) -> None:
        """End a use; no step computes with it any more."""
        if slot is None:
            self.slots.leave(holder)
        else:
            self.slots.release(slot)
        self._loaded[digest].users -= 1
        self._forget_unused(digest)
        self.on_slot_free()


class AdapterUse:
    """The use of an adapter by one attempt, from its arrival until no step computes it any more."""

    def __init__(self, store: AdapterStore, holder: Hashable, digest: bytes) -> None:
        self._store, self._holder, self._digest = store, holder, digest
        self._slot: int | None = None
        self._references = 1

    @property
    def placed(self) -> bool:
        """True if it has a slot."""
        return self._slot is not None

    @property
    def slot(self) -> int:
        """The slot for `SequenceStep.adapter`. Raises RuntimeError before `place`: never the base instead."""
        if self._slot is None:
            raise RuntimeError(f"the adapter of {self._holder} has no slot")
        return self._slot

    def may_place(self) -> bool:
        """Return whether it can have a slot now; if not it waits in line."""
        return self._store.slots.may_take(self._holder, self._digest)

    def place(self) -> None:
        """Take a slot; `may_place` was true."""
        self._slot = self._store.place(self._holder, self._digest)

    def retain(self) -> None:
        """Let it last until one more `release`."""
        self._references += 1

    def release(self) -> None:
        """End it with the last of its references. Raises RuntimeError if it has ended already."""
        if self._references < 1:
            raise RuntimeError(f"the adapter of {self._holder} was released twice")
        self._references -= 1
        if not self._references:
            self._store.end(self._holder, self._digest, self._slot)


def _finish(there: _Loaded) -> None:
    """Answer those that wait for an unload."""
    waiters, there.draining = there.draining, []
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _check_digest(digest: bytes, path: Path) -> None:
    found = adapter_files.read_adapter(path).digest
    if found != digest:
        raise AdapterNotLoaded(
            f"{path}: its content is {found.hex()[:12]}, and {digest.hex()[:12]} was asked for: "
            "the files here are other ones than those of the gateway, or have changed"
        )
