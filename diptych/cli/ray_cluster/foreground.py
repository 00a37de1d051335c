"""Foreground of `diptych up --ray`: join or start a cluster, start, print where it serves, wait for the end.

The life of a system: options are checked, Valkey is started here unless --redis-url names a server, every
program gets an actor, and once the gateway can route a request the addresses are printed. A signal ends the
actors in the order of `diptych up`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from diptych.cli.console import NoteConsole, Progress
from diptych.cli.foreground import StartFailed, print_addresses, report_failure
from diptych.cli.preflight import BadOptions, check_directory, check_options, read_programs, shutdown_timeouts
from diptych.cli.private_ca import with_certificates
from diptych.cli.process_events import Event, Stale
from diptych.cli.ray_cluster.actor import ProgramStart
from diptych.cli.ray_cluster.cluster import RayCluster, connected
from diptych.cli.ray_cluster.placement import Placement, place
from diptych.cli.ray_cluster.programs import RayPrograms
from diptych.cli.ray_cluster.targets import remove_targets, write_targets
from diptych.cli.ready_file import ReadyFile
from diptych.cli.stack import SharedSecrets, certificates_of, program_specs
from diptych.cli.stack_options import StackOptions
from diptych.cli.supervisor import Supervisor
from diptych.cli.up import (
    Stack,
    Stopped,
    await_routable,
    fetch_models,
    ready_paths,
    run_until_signal,
    shared_secrets,
    stop_programs,
    write_first,
)
from diptych.cli.valkey import start_valkey
from diptych.runtime.settings import config_digest
from diptych.runtime.settings_sources import VARIABLE_PREFIX

_READY_S = 300.0
_INHERITED = (VARIABLE_PREFIX, "OTEL_")


def serve_on_ray(
    options: StackOptions,
    address: str,
    *,
    ready_file: Path | None,
    targets_file: Path | None,
    show_secrets: bool,
) -> int:
    """Run on a Ray cluster until a signal comes. Exit status 1 when something did not start."""
    console = NoteConsole()
    progress = Progress(console, lines=True)
    try:
        read_programs(options)  # before a cluster starts
        with connected(address) as cluster:
            return run_until_signal(
                _serve(options, cluster, console, progress, ready_file, targets_file, show_secrets)
            )
    except Stopped:
        return 0
    except StartFailed as error:
        progress.close()
        report_failure(console, error, lines=True)
        return 1


async def _serve(
    options: StackOptions,
    cluster: RayCluster,
    console: Console,
    progress: Progress,
    ready_file: Path | None,
    targets_file: Path | None,
    show_secrets: bool,
) -> int:
    try:
        with with_certificates(options) as certified:
            async with running_on_ray(certified, cluster, progress, ready_file, targets_file) as stack:
                print_addresses(console, options, stack, show_secrets)
                await asyncio.Event().wait()  # until cancelled
        return 0
    finally:
        progress.close()


@asynccontextmanager
async def running_on_ray(
    options: StackOptions,
    cluster: RayCluster,
    observe: Callable[[Event], None],
    ready_file: Path | None = None,
    targets_file: Path | None = None,
) -> AsyncIterator[Stack]:
    """Start everything, yield once the gateway can route a request, and stop everything at exit.

    Raises BadOptions before anything starts, ChildFailed when a program does not start, ValkeyMissing when
    there is neither a redis_url nor a bundled server.
    """
    await asyncio.to_thread(fetch_models, options)
    placement = place(options, cluster.address, cluster.nodes(), cluster.here)
    options = placement.options
    # Ports and memory of this machine say nothing about another one.
    settings = (
        check_options(options, ready_file)
        if placement.one_machine
        else [one.settings for one in read_programs(options)]
    )
    timeouts = shutdown_timeouts(settings)
    options = replace(options, config_digest=config_digest(settings))
    if options.redis_url is not None:
        await check_directory(options.redis_url)
    file = ReadyFile(ready_file, observe) if ready_file is not None else None
    stack: Stack | None = None

    def changed() -> None:
        if stack is not None:
            if file is not None:
                file.update(stack.shared, programs.running())
            _update_targets(targets_file, programs, observe)

    beside = Supervisor(observe, grace_s=timeouts.kill_after_s)
    programs = RayPrograms(cluster, beside, observe, changed, grace_s=timeouts.kill_after_s)
    try:
        redis_url = options.redis_url or (await start_valkey(beside)).url
        shared = shared_secrets(options, redis_url)
        starts = _starts(options, placement, shared, timeouts.kill_after_s)
        await programs.start(placement, starts, _READY_S)
        stack = _stack(options, programs, beside, shared)
        await await_routable(stack)
        if file is not None:
            write_first(file, shared, programs.running())
        if targets_file is not None:
            _first_targets(targets_file, programs)
        yield stack
    finally:
        if file is not None:
            file.remove()
        if targets_file is not None:
            remove_targets(targets_file)
        await stop_programs(programs, stack, observe, timeouts.requests_s)


def _starts(
    options: StackOptions, placement: Placement, shared: SharedSecrets, grace_s: float
) -> dict[str, ProgramStart]:
    """Return what starts each program, by name."""
    environment = {name: text for name, text in os.environ.items() if name.startswith(_INHERITED)}
    return {
        one.name: ProgramStart(
            one.name, options, shared, placement.one_machine, environment, _READY_S, grace_s
        )
        for one in program_specs(options, shared, cores=1)
    }


def _stack(options: StackOptions, programs: RayPrograms, beside: Supervisor, shared: SharedSecrets) -> Stack:
    """Return the system as its users reach it: on the node of the gateway where it listens to all."""
    report = programs.gateway()
    announced = report.running and report.running.announced
    if not announced:
        raise BadOptions("--ray: the gateway ended as it became ready")
    return Stack(
        beside,
        shared,
        report.host,
        int(announced["grpc_port"]),
        int(announced["http_port"]),
        int(announced["admin_port"]),
        tls=options.tls_cert is not None,
        config_digest=options.config_digest or "",
        certificates=certificates_of(options, "gateway"),
        ready_paths=ready_paths(options),
    )


def _first_targets(path: Path, programs: RayPrograms) -> None:
    try:
        write_targets(path, programs.addresses())
    except OSError as error:
        raise BadOptions(f"--ray-targets: cannot write {path}: {error.strerror}") from None


def _update_targets(path: Path | None, programs: RayPrograms, observe: Callable[[Event], None]) -> None:
    if path is None:
        return
    try:
        write_targets(path, programs.addresses())
    except OSError as error:
        observe(Stale(f"{path}", error.strerror or f"{error}"))
