"""Checks before anything starts: options that no process could start with."""

import asyncio
import errno
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError

from decode_worker.config import DecodeSettings
from diptych.cli.child import Slot
from diptych.cli.hosted_pairs import BadSharing
from diptych.cli.ready_file import why_unwritable
from diptych.cli.role_memory import lacking_memory
from diptych.cli.stack import OWNED_FLAGS, SharedSecrets, program_specs, switch
from diptych.cli.stack_options import StackOptions
from diptych.runtime.bind_address import UnsafeBindError, require_safe_bind
from diptych.runtime.discovery.outage_log import without_login
from diptych.runtime.discovery.store import STORE_ERRORS, connect
from diptych.runtime.model_context import check_max_model_len
from diptych.runtime.model_files import checked_model
from diptych.runtime.model_images import model_images
from diptych.runtime.model_name import model_names
from diptych.runtime.python_module import module_arguments
from diptych.runtime.settings import ProgramSettings, StartupError
from diptych.runtime.settings_sources import BadSettings, Fault, Value, flag_of
from diptych.worker_process.config import RoleSettings
from gateway.adapter_service import read_configured
from gateway.config import GatewaySettings
from gateway.model.named_models import NamedModel, parse_models
from gateway.ports import admin_port_beside, port_clash
from kvtransfer.transports.prefault import available_memory
from prefill_worker.config import PrefillSettings
from prefill_worker.encoder.config import EncodeSettings

_SETTINGS: Mapping[str, type[ProgramSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encode": EncodeSettings,
}


_LEAVING_S = 2.0  # for the statuses of what did not finish, and the end of the process
_DIRECTORY_S = 3.0  # a busy machine may starve the first question
_DIRECTORY_PAUSE_S = 0.3


class BadOptions(ValueError):
    """Options that no process could start with."""


class Program(NamedTuple):
    """A process of `diptych up`: its role, its settings, and the values that flags and variables give it."""

    role: str
    settings: ProgramSettings
    values: Mapping[str, Value]


def check_options(options: StackOptions, ready_file: Path | None = None) -> list[ProgramSettings]:
    """Return the settings of each process. Raises BadOptions, in one line, for what each would else fail at
    after seconds of loading.
    """
    programs = read_programs(options)
    _check_ready_file(ready_file)
    _check_ports(options)
    settings = [one.settings for one in programs]
    if (why := lacking_memory(settings, available_memory())) is not None:
        raise BadOptions(why)
    return settings


def read_programs(options: StackOptions) -> list[Program]:
    """Return each process as it will be started. Raises BadOptions for options that none could start with."""
    try:
        require_safe_bind(options.host, encrypted=options.tls_cert is not None, insecure=options.insecure)
    except UnsafeBindError as error:
        raise BadOptions(str(error)) from None
    _check_switches(options)
    try:
        parse_models(options.model)
    except ValueError as error:
        raise BadOptions(f"--model: {error}") from None
    programs = _read_programs(options)
    _check_models(one.settings for one in programs)
    _check_adapters(one.settings for one in programs)
    return programs


def _check_models(settings: Iterable[ProgramSettings]) -> None:
    """Look at the files of every program's model, which --set may choose, without reading weights."""
    try:
        needs = {(model, one.max_model_len, one.mmproj) for one in settings for model in _models(one)}
        for model, tokens, mmproj in needs:
            path = checked_model(model.path)
            model_names(path, model.name)
            check_max_model_len(path, tokens)
            if mmproj is not None:
                model_images(path, mmproj)
    except StartupError as error:
        raise BadOptions(str(error)) from None


def _models(settings: ProgramSettings) -> tuple[NamedModel, ...]:
    if isinstance(settings, GatewaySettings):
        return tuple(one._replace(name=one.name or settings.model_name) for one in settings.models)
    return (NamedModel(settings.model_name, settings.model),)


def _check_adapters(settings: Iterable[ProgramSettings]) -> None:
    """Look at the files of --lora."""
    for one in settings:
        if isinstance(one, GatewaySettings):
            try:
                read_configured(one.adapters, one.max_lora_rank)
            except StartupError as error:
                raise BadOptions(str(error)) from None


def settable_fields(role: str) -> list[str]:
    """Return the fields of a program that may be set by --set or in its section of a file."""
    return [field for field in _SETTINGS[role].public_fields() if flag_of(field) not in OWNED_FLAGS]


def roles_with(flag: str) -> list[str]:
    """Return the programs that have a flag, such as "max-batch", and may be given it by --set."""
    field = flag.replace("-", "_")
    return [role for role in _SETTINGS if field in settable_fields(role)]


def _check_switches(options: StackOptions) -> None:
    """Raise BadOptions for a switch of a program that is neither true nor false."""
    for role, flag, value in options.overrides:
        field = _SETTINGS[role].model_fields.get(flag.replace("-", "_"))
        if field is not None and field.annotation is bool and not isinstance(switch(value), bool):
            raise BadOptions(f"--set {role}.{flag}={value}: takes true or false")


def _check_ports(options: StackOptions) -> None:
    if clash := port_clash(options.grpc_port, options.http_port, options.admin_port):
        raise BadOptions(clash)
    admin_port = admin_port_beside(options.grpc_port, options.admin_port)
    public = "--grpc-port and --http-port"
    for port, flags in (
        (options.grpc_port, public),
        (options.http_port, public),
        (admin_port, "--admin-port"),
    ):
        if _taken(options.host, port):
            raise BadOptions(
                f"port {port} of {options.host} is taken: {flags} choose others, 0 = any free one"
            )


def _taken(host: str, port: int) -> bool:
    """Return whether another process listens there.

    Our gateway shares its ports with its successor, so that it would share them with another system as well,
    and each would get half the calls.
    """
    if port == 0:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _check_ready_file(path: Path | None) -> None:
    if path is not None and (why := why_unwritable(path)) is not None:
        raise BadOptions(f"--ready-file: cannot write {path}: {why}")


def _read_programs(options: StackOptions) -> list[Program]:
    """Read what each program will be started with, as it will: a fault of all is told once."""
    shared = SharedSecrets(options.redis_url or "", options.secret or "")
    try:
        specs = program_specs(options, shared, cores=1)
    except BadSharing as error:
        raise BadOptions(str(error)) from None
    programs: list[Program] = []
    faults: dict[str, None] = {}
    for spec in [one for process in specs for one in process.workers]:
        argv = ["0" if isinstance(part, Slot) else part for part in module_arguments(spec.argv)]
        argv += ["--redis-url", options.redis_url] if options.redis_url else []
        try:
            settings, _, values = _SETTINGS[spec.role].read_sources(argv)
            programs.append(Program(spec.role, settings, values))
        except BadSettings as error:
            faults |= dict.fromkeys(_describe(fault, spec.role, options) for fault in error.faults)
    if faults:
        raise BadOptions("\n".join(faults))
    return programs


def _describe(fault: Fault, role: str, options: StackOptions) -> str:
    """Return a line for a program's fault that names what the user wrote."""
    origin = options.origins.get(f"{role}.{fault.field}") or options.origin(fault.field)
    if fault.field and origin == "--set":
        return f"--set {role}.{flag_of(fault.field)}: {fault.message}"
    flag = fault.message.partition(":")[0].removeprefix("--")
    if not fault.field and (role, flag) in {(target, name) for target, name, _ in options.overrides}:
        return f"--set {role}.{fault.message.removeprefix('--')}"
    return str(fault._replace(origin=origin))


@dataclass(frozen=True)
class ShutdownTimeouts:
    """Seconds that running requests get, and from SIGTERM to SIGKILL for any process."""

    requests_s: float
    kill_after_s: float


def shutdown_timeouts(settings: Iterable[ProgramSettings]) -> ShutdownTimeouts:
    """Return the timeouts of a system with these programs."""
    requests_s = longest_s = 0.0
    for one in settings:
        if isinstance(one, GatewaySettings):
            requests_s = max(requests_s, one.shutdown_timeout)
            longest_s = max(longest_s, one.lame_duck + one.shutdown_timeout)
        elif isinstance(one, RoleSettings):
            longest_s = max(longest_s, one.worker_shutdown_timeout)
    return ShutdownTimeouts(requests_s, longest_s + _LEAVING_S)


async def check_directory(url: str) -> None:
    """Raise BadOptions unless a server answers there: without one the gateway would never find a worker."""
    client = connect(url)
    try:
        deadline = time.monotonic() + _DIRECTORY_S
        while (why := await _why_unanswered(client)) is not None:
            if time.monotonic() > deadline:
                raise BadOptions(f"the directory at {without_login(url)} does not answer: {why}")
            await asyncio.sleep(_DIRECTORY_PAUSE_S)
    finally:
        await client.aclose()


async def _why_unanswered(client: Redis) -> str | None:
    """Return why it does not answer, or None. Raises BadOptions where it answers, and refuses the login."""
    try:
        await client.ping()
    except AuthenticationError as error:
        raise BadOptions(f"--redis-url: the directory refuses this login: {error}") from None
    except (BusyLoadingError, NoPermissionError):
        return None  # it is there: it reads its data, or forbids no more than the question
    except STORE_ERRORS as error:
        return str(error)
    return None
