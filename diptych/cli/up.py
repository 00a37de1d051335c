"""`diptych up`: run the whole system on this machine, from start to stop."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from diptych.cli.child import ChildFailed, ChildSpec
from diptych.cli.http_probe import http_body, http_status, reachable
from diptych.cli.preflight import BadOptions, check_directory, check_options, shutdown_timeouts
from diptych.cli.private_ca import with_certificates
from diptych.cli.process_events import ChangedRole, Ended, Event, Removed, Replaced, Serving, Stopping
from diptych.cli.ready_file import ReadyFile
from diptych.cli.stack import SharedSecrets, certificates_of, program_specs
from diptych.cli.stack_models import StackModels
from diptych.cli.stack_options import StackOptions
from diptych.cli.supervisor import Running, Supervisor
from diptych.cli.valkey import start_valkey
from diptych.engine.usable_cores import usable_cores
from diptych.runtime.hub import HubModel, download_model
from diptych.runtime.kv_tier_specs import kept_secret, parse_tiers
from diptych.runtime.process import ONE_SIGNAL_S
from diptych.runtime.settings import StartupError, config_digest
from gateway.model.named_models import parse_models

STOP_ORDER = ("gateway", "prefill", "encode", "pair", "decode")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ROUTABLE_TIMEOUT_S = 30.0
_ROUTABLE_PAUSE_S = 0.05
_COUNT_TIMEOUT_S = 1.0
_REQUEST_GAUGES = ("diptych_requests_running{", "diptych_requests_waiting{")


class Stoppable(Protocol):
    """Processes that can be ended: those of a Supervisor, or of a cluster."""

    def kill(self) -> None:
        """End every process at once. `stop` is still to be awaited."""

    async def stop(self, roles: Sequence[str] = ()) -> None:
        """End every process, those of `roles` first, one role after the other."""


@dataclass(frozen=True)
class Stack:
    """A running system: where to reach it, and what another gateway needs to join it."""

    supervisor: Supervisor
    shared: SharedSecrets
    host: str
    grpc_port: int
    http_port: int
    admin_port: int
    tls: bool = False
    config_digest: str = ""
    certificates: Path | None = None
    """Folder of the gateway's certificate for its links."""
    ready_paths: tuple[str, ...] = ("/ready",)
    """Paths of the gateway that answer 200 once all its models have workers."""
    models: StackModels | None = None

    @property
    def address(self) -> str:
        """host:port of the public gRPC API."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.http_port}"

    async def ready(self, worker_id: str = "") -> bool:
        """Return whether the gateway can route requests for every model, or with an id to this worker."""
        paths = (f"/ready?worker={worker_id}",) if worker_id else self.ready_paths
        return await _all_ready(self.host, self.http_port, paths, tls=self.tls)

    async def requests(self) -> int | None:
        """Return the number of requests of the gateway, running or waiting; None when it does not answer."""
        metrics = await http_body(
            self.host, self.http_port, "/metrics", tls=self.tls, timeout_s=_COUNT_TIMEOUT_S
        )
        if metrics is None:
            return None
        lines = [line for line in metrics.decode().splitlines() if line.startswith(_REQUEST_GAUGES)]
        return round(sum(float(line.rpartition(" ")[2]) for line in lines))


@asynccontextmanager
async def running_stack(
    options: StackOptions,
    observe: Callable[[Event], None],
    *,
    ready_file: Path | None = None,
    ready_timeout_s: float = 300.0,
) -> AsyncIterator[Stack]:
    """Start everything, yield once the gateway can route a request, and stop everything at exit.

    Raises BadOptions before anything starts, ChildFailed when a process does not start (no process is
    left then), ValkeyMissing when there is neither a redis_url nor a bundled server. `ready_file` is kept
    current; BadOptions when it cannot be written the first time, which a script may wait for.
    """
    with with_certificates(options) as certified:
        async with _running(certified, observe, ready_file, ready_timeout_s) as stack:
            yield stack


@asynccontextmanager
async def _running(
    options: StackOptions,
    observe: Callable[[Event], None],
    ready_file: Path | None,
    ready_timeout_s: float,
) -> AsyncIterator[Stack]:
    await asyncio.to_thread(fetch_models, options)
    settings = check_options(options, ready_file)
    timeouts = shutdown_timeouts(settings)
    options = replace(options, config_digest=config_digest(settings))
    if options.redis_url is not None:
        await check_directory(options.redis_url)
    file = ReadyFile(ready_file, observe) if ready_file is not None else None
    stack: Stack | None = None

    def relay(event: Event) -> None:
        observe(event)
        if file and stack and isinstance(event, (Ended, Serving, Replaced, Removed, ChangedRole)):
            # The supervisor's own record is complete only when this call has returned.
            asyncio.get_running_loop().call_soon(file.update, stack.shared, supervisor.running())

    supervisor = Supervisor(relay, ready_timeout_s=ready_timeout_s, grace_s=timeouts.kill_after_s)
    try:
        redis_url = options.redis_url or (await start_valkey(supervisor)).url
        shared = shared_secrets(options, redis_url)
        announced = await supervisor.start(
            program_specs(options, shared, usable_cores()),
            serves_without=partial(_serves_without, supervisor, options),
        )
        gateway = announced[0]
        if gateway is None:
            raise ChildFailed("gateway", "did not start")
        stack = Stack(
            supervisor,
            shared,
            reachable(options.host),
            int(gateway["grpc_port"]),
            int(gateway["http_port"]),
            int(gateway["admin_port"]),
            tls=options.tls_cert is not None,
            config_digest=options.config_digest or "",
            certificates=certificates_of(options, "gateway"),
            ready_paths=ready_paths(options),
            models=StackModels(options, shared, supervisor),
        )
        await await_routable(stack)
        if file is not None:
            write_first(file, shared, supervisor.running())
        yield stack
    finally:
        if file is not None:
            file.remove()
        await stop_programs(supervisor, stack, observe, timeouts.requests_s)


def shared_secrets(options: StackOptions, redis_url: str) -> SharedSecrets:
    """Return the values that the processes share; the secret is random where nothing chooses or keeps one."""
    secret = options.secret or kept_secret(parse_tiers(options.kv_tier or "")) or secrets.token_hex(32)
    return SharedSecrets(redis_url, secret)


def fetch_models(options: StackOptions) -> None:
    """Download the models of the Hub that are not here: the processes find them. Raises BadOptions."""
    try:
        for model in parse_models(options.model):
            if (of_hub := HubModel.parse(model.path)) is not None:
                download_model(of_hub)
    except (StartupError, ValueError) as error:
        raise BadOptions(f"--model: {error}") from None


async def _serves_without(supervisor: Supervisor, options: StackOptions, failed: ChildSpec) -> bool:
    """Return whether the system serves without a worker that did not start; waits for those that load still.

    At once False for the gateway, and when no other worker of the role, or of both roles of a process that
    hosts two, is alive.
    """
    settled_at: float | None = None
    roles = {one.role for one in failed.workers}
    while roles <= {one.role for one in supervisor.running() if one.pid}:
        alive = [one for one in supervisor.running() if one.pid is not None]
        gateway = next((one.announced for one in alive if one.role == "gateway" and one.announced), None)
        tls = options.tls_cert is not None
        host = reachable(options.host)
        paths = ready_paths(options)
        if gateway and await _all_ready(host, int(gateway["http_port"]), paths, tls=tls):
            return True
        loading = any(one.announced is None for one in alive)
        settled_at = None if loading else settled_at or time.monotonic()
        if settled_at is not None and time.monotonic() - settled_at > _ROUTABLE_TIMEOUT_S:
            return False
        await asyncio.sleep(_ROUTABLE_PAUSE_S)
    return False


def ready_paths(options: StackOptions) -> tuple[str, ...]:
    """Return the paths of the gateway that answer 200 once all models have workers."""
    names = [model.name for model in parse_models(options.model)]
    return tuple("/ready" if name is None else f"/ready?model={quote(name, safe='')}" for name in names)


async def _all_ready(host: str, port: int, paths: Iterable[str], *, tls: bool) -> bool:
    for path in paths:
        if await http_status(host, port, path, tls=tls) != 200:
            return False
    return True


def write_first(file: ReadyFile, shared: SharedSecrets, processes: Sequence[Running]) -> None:
    """Write a ready file for the first time. Raises BadOptions where it cannot be written."""
    try:
        file.write(shared, processes)
    except OSError as error:
        raise BadOptions(f"--ready-file: cannot write {file.path}: {error.strerror}") from None


async def await_routable(stack: Stack) -> None:
    """Wait until the gateway has found its workers. Raises ChildFailed when it does not."""
    deadline = time.monotonic() + _ROUTABLE_TIMEOUT_S
    while not await stack.ready():
        if time.monotonic() > deadline:
            raise ChildFailed(
                "gateway", f"found no workers that fit together within {_ROUTABLE_TIMEOUT_S:.0f} s"
            )
        await asyncio.sleep(_ROUTABLE_PAUSE_S)


async def stop_programs(
    programs: Stoppable, stack: Stack | None, observe: Callable[[Event], None], grace_s: float
) -> None:
    """Stop in order; a signal that comes meanwhile ends the graceful waiting, not the stopping."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def hurry() -> None:
        if loop.time() - began > ONE_SIGNAL_S:
            programs.kill()

    async def stop() -> None:
        try:
            if stack is not None:
                observe(Stopping(await stack.requests(), grace_s))
        finally:
            await programs.stop(STOP_ORDER)

    signals = _ending_signals()
    for signum in signals:
        loop.add_signal_handler(signum, hurry)
    try:
        await asyncio.shield(stop())
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def _ending_signals() -> list[signal.Signals]:
    """Return the signals that end a system: not SIGHUP under nohup, which outlives its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in _SIGNALS if not (ignored and signum == signal.SIGHUP)]


class Stopped(Exception):
    """A signal ended it."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.status = 128 + signum  # as a shell has it of what a signal killed


def run_until_signal(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` in a new event loop; SIGINT, SIGTERM or the end of the terminal cancel it. Raises Stopped
    then.
    """

    async def cancellable() -> int:
        task = asyncio.ensure_future(main)
        received: list[signal.Signals] = []

        def cancel(signum: signal.Signals) -> None:
            received.append(signum)
            task.cancel()

        for signum in _ending_signals():
            asyncio.get_running_loop().add_signal_handler(signum, cancel, signum)
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            raise Stopped(received[0]) from None

    return asyncio.run(cancellable())
