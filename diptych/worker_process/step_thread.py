"""The engine's thread of a worker: computes its steps, abortable, and contains rows that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from diptych.engine.batch import AbortWords
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.device import context_lost
from diptych.engine.sampling import SampleFailure
from diptych.runtime.failpoints import failpoint
from diptych.runtime.process import leave
from diptych.worker_process.step_watchdog import StepWatchdog

Row = TypeVar("Row")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)
Owner = TypeVar("Owner")

SLOW_STEP_S = 0.15  # added to every step by the failpoint `worker.slow_step`


@dataclass(frozen=True, eq=False)
class InFlight(Generic[Owner]):
    """A step that was begun: the owner of each row, and the words by which rows are aborted."""

    owners: Sequence[Owner]
    abort: AbortWords


class StepThread(Generic[Owner]):
    """Computes one step at a time. While it does, the blocks of each owner of a row are being written."""

    def __init__(self, cpu: CpuPolicy | None = None) -> None:
        """Start no thread yet; the first step does, with the turns on the CPU that `cpu` gives it."""
        initializer = None if cpu is None else cpu.enter_engine_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=initializer)
        self._flights: list[InFlight[Owner]] = []
        self.watchdog = StepWatchdog()

    @property
    def busy(self) -> bool:
        """True while a step is being computed."""
        return bool(self._flights)

    def writes(self, owner: Owner) -> bool:
        """Return whether the blocks of `owner` are being written."""
        return any(one is owner for flight in self._flights for one in flight.owners)

    def abort(self, owner: Owner) -> None:
        """Abort the rows of `owner`: they end within a layer, and are written until then."""
        for flight in self._flights:
            for number, one in enumerate(flight.owners):
                if one is owner:
                    flight.abort.abort(number)

    def begin(self, owners: Sequence[Owner]) -> InFlight[Owner]:
        """Mark the blocks of `owners` as being written: a step is begun, or will be."""
        flight = InFlight(owners, AbortWords(len(owners)))
        self._flights.append(flight)
        return flight

    def end(self, flight: InFlight[Owner]) -> None:
        """Mark the step as ended: it writes no more."""
        self._flights.remove(flight)

    async def compute(
        self,
        owners: Sequence[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        tokens: int | None = None,
    ) -> Sequence[Result | SampleFailure]:
        """Run `compute_rows` on the engine's thread; one owner a row. `tokens` in all (default: one a row).

        When this call is cancelled the thread goes on, and so the owners stay: their blocks are not free.
        """
        flight = self.begin(owners)
        results = await self.await_rows(flight, rows, compute, tokens)
        self.end(flight)
        return results

    async def encode(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which encodes a tile of an image on the engine's thread, between
        steps.
        """
        self.watchdog.begin_encode(time.monotonic())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self.watchdog.end(time.monotonic())

    async def await_rows(
        self,
        flight: InFlight[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        tokens: int | None = None,
        completion: Callable[[], Awaitable[bool]] | None = None,
    ) -> Sequence[Result | SampleFailure]:
        """Compute a step as `compute` does that was begun before and is not ended by this call.

        `completion` may wait for the step on the event loop: where it returns True, `compute` has nothing to
        wait for any more and is called there.
        """
        self.watchdog.begin(len(rows) if tokens is None else tokens, time.monotonic())
        if failpoint("worker.slow_step"):
            await asyncio.sleep(SLOW_STEP_S)
        results = await self._results(flight, rows, compute, completion)
        self.watchdog.end(time.monotonic())
        return results

    async def _results(
        self,
        flight: InFlight[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        completion: Callable[[], Awaitable[bool]] | None,
    ) -> Sequence[Result | SampleFailure]:
        work = compute_rows
        if completion is not None:
            try:
                if await completion():
                    return compute(rows, flight.abort)
            except Exception as error:
                _log_failure(rows, error)
                work = compute_parts
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, rows, flight.abort, compute, self._on_retry)

    def _on_retry(self) -> None:
        """Record, on the engine's thread, that a part of a failed step begins."""
        self.watchdog.retry(time.monotonic())

    def close(self) -> None:
        """Wait for the step that is being computed, and compute no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def compute_rows(
    rows: Sequence[Row],
    abort: AbortWords,
    compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
    on_retry: Callable[[], None],
) -> Sequence[Result | SampleFailure]:
    """Return the results of `rows`, in order; SampleFailure for a row that raises even when it is alone.

    Computing a row twice is safe: it writes the same keys and values to the same places. Runs on the
    engine's thread; the words of `abort` keep counting for each row. `on_retry` is called before each part of
    a step that failed.
    """
    try:
        return compute(rows, abort)
    except Exception as error:
        _log_failure(rows, error)
    return compute_parts(rows, abort, compute, on_retry)


def compute_parts(
    rows: Sequence[Row],
    abort: AbortWords,
    compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
    on_retry: Callable[[], None],
) -> Sequence[Result | SampleFailure]:
    """Return the results of `rows`, which failed together, as `compute_rows` does: each half is a step of its
    own, and so on.

    One bad row of n costs 2 log2 n steps, and all others are in one of them. A row that failed alone gets
    another try: launched steps fail for reasons that are not the row's.
    """
    middle = len(rows) // 2
    results: list[Result | SampleFailure] = []
    for part in (slice(middle), slice(middle, None)) if middle else (slice(None),):
        some, words = list(rows[part]), AbortWords(1)
        words.words = abort.words[part]  # a view: setting a word of the step sets it here
        on_retry()
        try:
            results += compute(some, words)
        except Exception as error:
            if len(some) == 1:
                results.append(SampleFailure(f"step failed: {type(error).__name__}"))
            else:
                results += compute_parts(some, words, compute, on_retry)
    return results


def _log_failure(rows: Sequence[Row], error: Exception) -> None:
    """Log `error`, which is being handled. Ends the process where no step can succeed any more.

    All requests then go on elsewhere, or here after the restart: tried again, they would fail.
    """
    if context_lost(error):
        _log.critical("the GPU is lost to a fault of a kernel: this process ends", exc_info=True)
        leave(1)
    _log.exception("a step of %d rows failed; its halves are computed apart", len(rows))
