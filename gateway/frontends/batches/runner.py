"""Runner of batches: takes those that no gateway runs, and brings each to its end.

    validating ──bad line──────────────────────────────► failed
        │
    in_progress ──all lines have results──► finalizing ─► completed
        ├──24 h have passed───────────────► finalizing ─► expired
        └──a client cancels───────────────► finalizing ─► cancelled

A line that is not run gets a result that says so: every line of an input has one result, once the batch has
ended. A gateway that shuts down lets its batches go, and results in the making are not written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Final

from diptych.runtime.task_cancellation import to_its_end
from gateway.access.access import Caller
from gateway.frontends.batches.line_call import LineRunner
from gateway.frontends.batches.lines import MAX_FAULTS, MAX_LINES, BadLine, BatchLine, not_run, read_line
from gateway.frontends.batches.records import BatchRecord, Status
from gateway.frontends.batches.store import ERRORS, OUTPUT, BatchStore

LOOK_S: Final = 1.0
"""Pause between two looks for batches to take, and for clients that cancel."""
_FORGET_S: Final = 3600.0  # pause between two looks for what is too old
_LINES_A_TURN: Final = 50  # checked before other work of the event loop gets its turn
_NOT_RUN: Final = {
    "expired": ("batch_expired", "the batch's window ended before this request ran"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request ran"),
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """Batch that this gateway runs; `caller` is None where it is only to end."""

    record: BatchRecord
    caller: Caller | None
    done: set[str] = field(default_factory=set)  # ids of lines that have a result
    files: dict[str, IO[bytes]] = field(default_factory=dict)
    ending: Status = "completed"  # set once it is to end early

    def write(self, name: str, custom_id: str, result: bytes) -> None:
        if self.files[name].write(result) != len(result):
            raise OSError("a result was cut: the disk is full")
        self.done.add(custom_id)
        self.record.completed += name == OUTPUT
        self.record.failed += name == ERRORS


class BatchRunner:
    """Runner of this gateway.

    Args:
        caller_of: returns the caller that requests of (tenant, key) run as, None without such a key.
        concurrency: lines that run at once, of all batches.
        keep_s: seconds after which ended batches and files are deleted.
    """

    def __init__(
        self,
        store: BatchStore,
        lines: LineRunner,
        caller_of: Callable[[str, str], Caller | None],
        *,
        concurrency: int,
        keep_s: float,
    ) -> None:
        self._store = store
        self._lines = lines
        self._caller_of = caller_of
        self._slots = asyncio.Semaphore(concurrency)
        self._keep_s = keep_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()  # ids of batches that are over
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="batches")

    def wake(self) -> None:
        """Look for new batches now."""
        self._wake.set()

    async def stop(self) -> None:
        """Let all batches go; another gateway may take them at once."""
        tasks = [*self._running.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        forgot_at = 0.0
        while True:
            try:
                await self._take_batches()
                if time.time() - forgot_at > _FORGET_S:
                    forgot_at = time.time()
                    await asyncio.to_thread(self._store.forget_before, forgot_at - self._keep_s)
            except (OSError, ValueError, TypeError) as error:
                _log.error("the batches cannot be read: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _take_batches(self) -> None:
        for record in await asyncio.to_thread(lambda: list(self._store.all_batches(self._ended))):
            if record.ended:
                self._ended.add(record.id)
                continue
            if record.id in self._running:
                continue
            lock = self._store.lock(record)
            if lock is not None:
                task = asyncio.create_task(self._run(record, lock), name=record.id)
                self._running[record.id] = task

    async def _run(self, record: BatchRecord, lock: IO[bytes]) -> None:
        """Bring a batch to its end. A disk that fails leaves it as it is, to be taken again."""
        try:
            with lock:
                # Another gateway may have ended it since it was listed.
                record = self._store.batch(record.tenant, record.id)
                if not record.ended:
                    await self._to_its_end(record)
        except FileNotFoundError:
            _log.warning("batch %s or its input was deleted", record.id)
        except (OSError, ValueError) as error:
            _log.error("batch %s does not go on: %s", record.id, error)
            await asyncio.sleep(LOOK_S)
        finally:
            del self._running[record.id]

    async def _to_its_end(self, record: BatchRecord) -> None:
        if record.status == "validating":
            await self._validate(record)
        if record.status == "in_progress":
            await self._run_lines(record)
        if record.status == "finalizing":
            await _written(self._finish, record)

    async def _validate(self, record: BatchRecord) -> None:
        faults, ids, number = list[BadLine](), set[str](), 0
        with self._input(record) as lines:
            for number, data in lines:
                try:
                    line = read_line(number, data, (record.endpoint,))
                    if line.custom_id in ids:
                        raise BadLine(number, "custom_id", "is that of an earlier line")
                    ids.add(line.custom_id)
                except BadLine as fault:
                    faults.append(fault)
                if number > MAX_LINES:
                    faults.append(BadLine(number, "", f"must be one of at most {MAX_LINES} lines"))
                if len(faults) >= MAX_FAULTS:
                    break
                if not number % _LINES_A_TURN:
                    await asyncio.sleep(0)
        if not number:
            faults.append(BadLine(0, "", "the file has no line"))
        record.total = len(ids)
        record.errors = [fault.as_object() for fault in faults]
        record.move("failed" if faults else "in_progress", time.time())
        await _written(self._store.save, record)

    @contextlib.contextmanager
    def _input(self, record: BatchRecord) -> Iterator[Iterator[tuple[int, bytes]]]:
        """Open the input; yields its lines with their numbers, without empty ones."""
        with self._store.content(record.tenant, record.input_file_id).open("rb") as file:
            yield ((number, data) for number, data in enumerate(file, 1) if data.strip())

    async def _run_lines(self, record: BatchRecord) -> None:
        caller = self._caller_of(record.tenant, record.key)
        if caller is None:
            record.errors = [{"code": "no_api_key", "message": "the API key that made the batch is gone"}]
            record.ending = "cancelled"
        run = _Run(record, caller, ending=record.ending)
        for name in (OUTPUT, ERRORS):
            found = await asyncio.to_thread(self._store.results, record, name)
            run.done |= found
            run.files[name] = self._store.open_results(record, name)
            record.completed = len(found) if name == OUTPUT else record.completed
            record.failed = len(found) if name == ERRORS else record.failed
        watching = asyncio.create_task(self._watch(run))
        try:
            await self._feed(run)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for file in run.files.values():
                file.close()
        record.ending = run.ending
        record.move("finalizing", time.time())
        await _written(self._store.save, record)

    async def _feed(self, run: _Run) -> None:
        """Begin lines as slots become free, until all have a result or it is to end early."""
        try:
            async with asyncio.TaskGroup() as group:
                with self._input(run.record) as lines:
                    for number, data in lines:
                        line = read_line(number, data, (run.record.endpoint,))
                        if line.custom_id not in run.done:
                            await self._begin(run, line, group)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _begin(self, run: _Run, line: BatchLine, group: asyncio.TaskGroup) -> None:
        """Begin a line once a slot is free; of a batch that is to end, say that it is not run."""
        if run.ending == "completed":
            await self._slots.acquire()
            if run.ending == "completed":
                group.create_task(self._one(run, line)).add_done_callback(lambda _: self._slots.release())
                return
            self._slots.release()
        run.write(ERRORS, line.custom_id, not_run(line, *_NOT_RUN[run.ending]))

    async def _one(self, run: _Run, line: BatchLine) -> None:
        record = run.record
        if run.caller is None:
            raise RuntimeError("a line of a batch without a caller")
        found = await self._lines.run(record.id, line, run.caller, record.expires_at)
        if found is None:
            run.write(ERRORS, line.custom_id, not_run(line, *_NOT_RUN["expired"]))
            return
        succeeded, result = found
        run.write(OUTPUT if succeeded else ERRORS, line.custom_id, result)

    async def _watch(self, run: _Run) -> None:
        """Save the counts, and look whether the batch is to end early."""
        record, saved = run.record, -1
        while True:
            if self._store.is_cancelled(record.tenant, record.id):
                run.ending = "cancelled"
            elif time.time() > record.expires_at:
                run.ending = "expired"
            if saved != len(run.done):
                saved = len(run.done)
                await _written(self._store.save, record)
            await asyncio.sleep(LOOK_S)

    def _finish(self, record: BatchRecord) -> None:
        now = time.time()
        record.output_file_id = self._store.publish(record, OUTPUT, now)
        record.error_file_id = self._store.publish(record, ERRORS, now)
        record.move(record.ending, now)
        self._store.save(record)


async def _written(write: Callable[[BatchRecord], None], record: BatchRecord) -> None:
    """Write a record in a thread, to the end even where the caller is cancelled.

    The batch's lock is released after it: a write that is late must not replace that of another gateway.
    """
    await to_its_end(asyncio.to_thread(write, record))
