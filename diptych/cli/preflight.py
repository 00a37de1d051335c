"""What can be known before anything starts: options that no process could start with."""

import asyncio
import errno
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError

from decode_worker.config import DecodeSettings
from diptych.cli.child import Slot
from diptych.cli.ready_file import why_unwritable
from diptych.cli.stack import OWNED_FLAGS, SharedSecrets, program_specs, switch
from diptych.cli.stack_options import StackOptions
from diptych.runtime.bind_address import UnsafeBindError, require_safe_bind
from diptych.runtime.discovery.outage_log import without_login
from diptych.runtime.discovery.store import STORE_ERRORS, connect
from diptych.runtime.model_context import check_max_model_len
from diptych.runtime.model_name import model_names
from diptych.runtime.settings import BadSettings, ProgramSettings
from diptych.runtime.startup_error import StartupError
from gateway.config import GatewaySettings, admin_port_beside, port_clash
from prefill_worker.config import PrefillSettings

_SETTINGS: Mapping[str, type[ProgramSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


_DIRECTORY_S = 3.0  # a busy machine may starve the first question
_DIRECTORY_PAUSE_S = 0.3


class BadOptions(ValueError):
    """Options that no process could start with."""


def check_options(options: StackOptions, ready_file: Path | None = None) -> list[ProgramSettings]:
    """Raises BadOptions, in one line, for what every process would else fail at after seconds of loading.

    Returns what each of them will be told.
    """
    try:
        require_safe_bind(options.host, encrypted=options.tls_cert is not None, insecure=options.insecure)
    except UnsafeBindError as error:
        raise BadOptions(str(error)) from None
    _check_switches(options)
    _check_ready_file(ready_file)
    _check_ports(options)
    settings = _read_settings(options)
    _check_models(settings)
    return settings


def _check_models(settings: Iterable[ProgramSettings]) -> None:
    """Look at the files of every program's model, which --set may choose, without reading weights."""
    try:
        for path, name, tokens in {
            (one.checked_model_path(), one.model_name, one.max_model_len) for one in settings
        }:
            model_names(path, name)
            check_max_model_len(path, tokens)
    except StartupError as error:
        raise BadOptions(str(error)) from None


def roles_with(flag: str) -> list[str]:
    """The programs that have a flag, such as "max-batch", and may be given it by --set."""
    field = flag.replace("-", "_")
    return [
        role
        for role, settings in _SETTINGS.items()
        if field in settings.model_fields and flag not in OWNED_FLAGS
    ]


def _check_switches(options: StackOptions) -> None:
    """A program, whose switches take no value, could only say that there is a word too many."""
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
    """Whether somebody listens there. Our gateway shares its ports with its successor, so that it would
    share them with another system as well, and each would get half the calls.
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


def _read_settings(options: StackOptions) -> list[ProgramSettings]:
    """Reads what each program will be started with, as it will: a fault of all is told once."""
    shared = SharedSecrets(options.redis_url or "", options.secret or "")
    settings: list[ProgramSettings] = []
    faults: dict[str, None] = {}
    for spec in program_specs(options, shared, cores=1):
        argv = ["0" if isinstance(part, Slot) else part for part in spec.argv[spec.argv.index("-m") + 2 :]]
        argv += ["--redis-url", options.redis_url] if options.redis_url else []
        try:
            settings.append(_SETTINGS[spec.role].read_argv(argv))
        except BadSettings as error:
            faults.update(dict.fromkeys(error.faults))
    if faults:
        raise BadOptions("\n".join(faults))
    return settings


async def check_directory(url: str) -> None:
    """Raises BadOptions unless a server answers there: without one the gateway would never find a worker."""
    client = connect(url)
    try:
        deadline = time.monotonic() + _DIRECTORY_S
        while (why := await _silence(client)) is not None:
            if time.monotonic() > deadline:
                raise BadOptions(f"the directory at {without_login(url)} does not answer: {why}")
            await asyncio.sleep(_DIRECTORY_PAUSE_S)
    finally:
        await client.aclose()


async def _silence(client: Redis) -> str | None:
    """Why it does not answer, or None. Raises BadOptions where it answers, and will not have us."""
    try:
        await client.ping()
    except AuthenticationError as error:
        raise BadOptions(f"--redis-url: the directory refuses this login: {error}") from None
    except (BusyLoadingError, NoPermissionError):
        return None  # it is there: it reads its data, or forbids no more than the question
    except STORE_ERRORS as error:
        return str(error)
    return None
