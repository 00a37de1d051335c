"""The life of a program: event loop, signals, the parent's death, logging, the ready line.

A program's `__main__` parses its settings and calls `run_program(main, settings)`. `main` serves
until the stop event is set, drains, and returns the exit status. The first SIGTERM or SIGINT sets
the event, a later one ends the process at once. A process that was given a death pipe never outlives
its parent: the kernel kills it when the parent dies (PR_SET_PDEATHSIG), and where that cannot work
(a parent that died before the call, another thread of it that forked, another system than Linux)
the pipe's end of file does.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NoReturn

import uvloop

from diptych.runtime.cpu_time_slice import take_short_turns
from diptych.runtime.descriptors import raise_descriptor_limit, shortage
from diptych.runtime.log_format import JsonFormatter, OneLineFormatter
from diptych.runtime.nonblocking_stderr import NonblockingStream
from diptych.runtime.otlp_export import log_export_handler
from diptych.runtime.settings import CANNOT_START, ProgramSettings, StartupError

_PR_SET_PDEATHSIG = 1
ONE_SIGNAL_S = 0.1
"""timeout(1) signals its child and then the group that it is in: what comes so close together is one."""
_log = logging.getLogger(__name__)

Main = Callable[[asyncio.Event], Awaitable[int]]


@functools.cache
def incarnation() -> int:
    """Return a random non-zero 63-bit number, the same for the life of this process: a restart is another
    one.
    """
    return secrets.randbits(62) | (1 << 62)


def run_program(main: Main, settings: ProgramSettings) -> int:
    """Run `main` on a uvloop event loop with signals, logging and the death watch set up.

    Returns the process's exit status: that of `main`, or 1 when it raised (the exception is logged, of
    StartupError the message alone).
    """
    set_up_logging(settings)
    _log.info("configuration %s", settings.digest)
    take_short_turns()
    raise_descriptor_limit()
    if warning := shortage():
        _log.warning(warning)
    if settings.death_fd is not None:
        watch_parent(settings.death_fd)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(main))
    except StartupError as error:
        _log.error(f"{CANNOT_START}%s", error, exc_info=settings.log_level == "debug")
        return 1
    except Exception:
        _log.exception("stopped by an error")
        return 1


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process at once, until its event loop listens: it starts, and has nothing to
    finish.

    That is what happens anyway, but to the first process of a container: the kernel spares it signals that it
    has no handler for. It would start, serve, and be killed in the middle of its work when the grace is over.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector while a program's modules are imported.

    It finds nothing to free in them, and takes a tenth of a start's CPU time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leave(status: int) -> NoReturn:
    """End this process at once, when all that matters is closed.

    Taking an interpreter with torch apart object by object takes a second of CPU time, ten on a busy machine,
    and a supervisor waits for it.
    """
    with contextlib.suppress(OSError):  # there is no reader any more
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


async def _serve(main: Main) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = _Signals(stop)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, signals.on_signal, signum)
    return await main(stop)


class _Signals:
    """Handler of signals: the first one stops, a later one does not wait."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._first_at = 0.0

    def on_signal(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if not self._stop.is_set():
            _log.info("%s: stopping", signum.name)
            self._first_at = now
            self._stop.set()
        elif now - self._first_at > ONE_SIGNAL_S:
            _log.warning("second %s: exiting at once", signum.name)
            os._exit(128 + signum)


def watch_parent(death_fd: int) -> None:
    """Tie this process's life to its parent's. Call it early, in the main thread.

    The kernel's signal follows the parent *thread* that started this process, so a supervisor starts
    its children from a thread that lives as long as they should.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            _log.warning("PR_SET_PDEATHSIG failed with errno %d; the death pipe remains", ctypes.get_errno())

    def wait_for_eof() -> None:
        # A thread, not a reader on the loop: a hung loop must not outlive the parent either.
        with contextlib.suppress(OSError):
            while os.read(death_fd, 64):
                pass
        os._exit(1)

    threading.Thread(target=wait_for_eof, name="death-watch", daemon=True).start()


def announce_ready(settings: ProgramSettings, ports: Mapping[str, int], *, record: str = "") -> None:
    """Tell the parent that this process serves: one JSON line on ready_fd, which is then closed.

    The line holds `ports` (grpc_port, http_port), the worker id and, of a worker, its `record` for gateways.
    Without ready_fd it is logged. What is on the heap by now stays, and the garbage collector looks at it no
    more: a full collection stopped a gateway for 80 ms, in which all its streams stood still.
    """
    gc.collect()
    gc.freeze()
    announced = {**ports, "worker_id": settings.worker_id}
    _log.info("ready %s", json.dumps(announced))
    if settings.ready_fd is not None:
        write_ready_line(settings.ready_fd, {**announced, "record": record} if record else announced)


def write_ready_line(ready_fd: int, announced: Mapping[str, object]) -> None:
    """Write `announced` as one JSON line to the pipe `ready_fd`, and close it."""
    try:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(announced) + "\n")
    except BrokenPipeError:
        _log.warning("the ready line has no reader")


async def read_ready_line(ready_fd: int) -> bytes:
    """Return the line that comes by the pipe `ready_fd`, without its end where the writer ends first.

    Closes the pipe. No thread waits for it: one would outlive a caller that is cancelled.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready_fd, "rb")
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def set_up_logging(settings: ProgramSettings) -> None:
    """Send all logging to stderr, one line a record, and where that is asked for over OTLP.

    What was set up before is replaced.
    """
    handler = logging.StreamHandler(NonblockingStream(sys.stderr))
    formatter = JsonFormatter if settings.log_format == "json" else OneLineFormatter
    handler.setFormatter(formatter(settings.program, settings.worker_id))
    handlers: list[logging.Handler] = [handler]
    if (export := log_export_handler(f"diptych-{settings.program}", settings.worker_id)) is not None:
        handlers.append(export)
    logging.basicConfig(handlers=handlers, level=settings.log_level.upper(), force=True)
    if settings.log_level != "debug":
        # Libraries' own chatter; their warnings and errors stay.
        for name in ("asyncio", "grpc", "redis"):
            logging.getLogger(name).setLevel(logging.WARNING)
