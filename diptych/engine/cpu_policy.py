"""The cores of one worker's steps: home cores, cores borrowed from other workers, and when they are yielded.

Prefill and decode workers of one machine want the same cores. Everything that engine loops, runner and step
thread do about that is a verb of `CpuPolicy`:

    claim, yield_                 the home cores are needed here; other workers may borrow them
    begin_step, end_step          threads and borrowed cores of one step
    set_backlog                   prefill publishes for how long prompts have waited
    begin_decode, end_decode,     decode begins its steps less often while prompts wait
    pause_s, may_launch_ahead
    turns, end_decode_turn        turns on a device that one process computes both phases on
    enter_engine_thread           turns of the engine's thread on the CPU

On a GPU, whose workers share no cores but its time, a `SharedBacklog` is all there is: decode begins its
steps less often while prompts wait for the card. With neither, no verb has an effect but the number of
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from diptych.engine.backend import Backend, CoreLendingBackend, LaunchingBackend
from diptych.engine.card_turns import CardTurns
from diptych.engine.shared_backlog import SharedBacklog
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_pacing import CoreLendingTuner, StepPacing
from diptych.engine.usable_cores import usable_cores


def _no_turns() -> None:
    """Leave the length of a thread's turns to the kernel."""


class CpuPolicy:
    """The policy of one backend. One thread at a time may begin and end steps; any thread may claim."""

    def __init__(
        self,
        backend: Backend,
        threads: int = 0,
        *,
        shared: SharedCores | None = None,
        backlog: SharedBacklog | None = None,
        pacing: StepPacing | None = None,
        turns: CardTurns | None = None,
        long_turns: Callable[[], object] = _no_turns,
        short_turns: Callable[[], object] = _no_turns,
    ) -> None:
        """Serve `backend` with `threads` cores a step; 0 is all that this process may use.

        With `shared`, a step has the home cores and what others lend; its backlog counts. `backlog` is that
        of workers on one GPU; with `turns` the two workers of one process take turns there instead.
        `long_turns` and `short_turns` set the turns of the calling thread. Raises ValueError for a negative
        number of threads.
        """
        if threads < 0:
            raise ValueError("a negative number of threads")
        self.threads = threads or usable_cores()
        self._backend = backend
        self._shared = shared
        self._backlog = backlog if shared is None else shared.backlog
        self.turns = turns
        """Turns on a device on which this process computes both phases; None: it computes one, or both at
        once.
        """
        self._pacing = pacing or StepPacing(1.0)
        launches = isinstance(backend, LaunchingBackend)
        self._take_cpu_turns = short_turns if launches else long_turns
        self._lending: CoreLendingBackend | None = None
        self._launches_on_cores = launches and isinstance(backend, CoreLendingBackend)
        if shared is not None and isinstance(backend, CoreLendingBackend):
            backend.use_idle_cores(shared.address, shared.others)
            self._lending = backend
        self._tuner = CoreLendingTuner()
        self._set: tuple[int, int] | None = None  # (calling thread, threads) that the backend has now

    # ---- home cores ----------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take the home cores back: a step is about to be made.

        The event loop calls it early: the thread that computes may have to wait for the core itself.
        """
        if self._shared is not None:
            self._shared.claim()

    def yield_(self) -> None:
        """Let other workers use the home cores: there is no step to make for now."""
        self.set_backlog(None)
        if self._shared is not None:
            self._shared.yield_()

    def end_decode_turn(self, *, idle: bool = False) -> None:
        """Leave the card to prompts between decode steps. `idle`: nothing is left to decode."""
        if self.turns is not None:
            self.turns.end_streams(idle=idle)

    # ---- one step ------------------------------------------------------------------------------------

    def begin_step(self, *, tuned: bool = False) -> float:
        """Claim the cores of a step; return the share of its layers that is computed without borrowed ones.

        `tuned` is for launched steps of a single stream: their share is tuned, others borrow from the start.
        """
        self.claim()
        self._set_threads(self._num_threads())
        if self._lending is None:
            return 0.0
        share = self._tuner.next_share() if tuned else 0.0
        self._lending.use_idle_cores_after(share)
        return share

    def end_step(self, share: float, seconds: float) -> None:
        """Record the length of a step that was begun `tuned`."""
        if self._lending is not None:
            self._tuner.record(share, seconds)

    def enter_engine_thread(self) -> None:
        """Set the calling thread's turns on the CPU: long if it computes, short if it waits for a backend."""
        self._take_cpu_turns()

    def _num_threads(self) -> int:
        """Return how many cores a step begins with."""
        if self._shared is None:
            return self.threads
        return self._shared.num_home + (0 if self._lending else self._shared.num_idle())

    def _set_threads(self, threads: int) -> None:
        # OpenMP keeps the number of threads per calling thread.
        wanted = threading.get_ident(), threads
        if self._set != wanted:
            self._set = wanted
            self._backend.set_threads(threads)

    # ---- between the phases --------------------------------------------------------------------------

    def set_backlog(self, waited_s: float | None) -> None:
        """Publish for how long prompts have waited that the present step does not take; None: none wait."""
        if self._backlog is not None:
            self._backlog.set(waited_s)

    def begin_decode(self, now: float) -> None:
        """Claim the cores for a decode step that begins now."""
        self._pacing.begin(now)
        self.claim()

    def end_decode(self, now: float, *, with_prompts: bool = False) -> None:
        """Record the end of a decode step, and the begin of one that was launched ahead.

        `with_prompts`: it computed chunks of prompts, too (`StepPacing.end`).
        """
        seconds = self._pacing.end(now, with_prompts=with_prompts)
        if self.turns is not None:
            self.turns.count_streams(seconds)
        self._pacing.begin(now)

    def pause_s(self, now: float) -> float:
        """Return the seconds until a decode step is due, and yield the cores to prompts until then.

        0 while no prompt of another worker waits for cores, or for the GPU.
        """
        waited_s = self._others_backlog_s()
        if waited_s is None:
            return 0.0
        pause = self._pacing.pause_s(now, waited_s)
        if pause:
            self.yield_()
        return pause

    def slack_s(self) -> float:
        """Return the seconds of the pauses between decode steps; 0 while no prompt waits for cores."""
        waited_s = self._others_backlog_s()
        return 0.0 if waited_s is None else self._pacing.slack_s(waited_s)

    def may_launch_ahead(self) -> bool:
        """Return whether the next step may follow the present one without a gap.

        Not if prompts wait for cores between the steps. Nor if no core is left to the threads that pass
        tokens on: without one they take their time from a step; between steps that delays this worker only.
        """
        if self.turns is not None and not self.turns.may_go_on:
            return False
        if self._others_backlog_s() is not None:
            return False
        if not self._launches_on_cores:
            return True
        return self._shared is not None and self._shared.has_spare()

    def _others_backlog_s(self) -> float | None:
        if self._backlog is None or self.turns is not None:
            return None
        return self._backlog.of_others_s()
