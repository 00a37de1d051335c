"""Processes of Diptych on one machine, and their flags."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from diptych.cli.child import Announcement, ChildSpec, Slot
from diptych.cli.hosted_pairs import pair_up, sharing_of
from diptych.cli.http_probe import http_status, reachable
from diptych.cli.stack_options import AUTO_TLS, LOOPBACK, StackOptions
from diptych.cli.worker_specs import WorkerPlace, encode_threads, encoded_models, role_changes, worker_places
from diptych.runtime.bind_address import is_loopback
from diptych.runtime.flag_names import canonical
from diptych.runtime.python_module import module_command
from diptych.runtime.role_change import ROLES as WORKER_ROLES
from gateway.model.named_models import NamedModel
from gateway.ports import admin_port_beside

_HEALTH_TIMEOUT_S = 5.0
MODULES = {
    "gateway": "gateway",
    "prefill": "prefill_worker",
    "decode": "decode_worker",
    "encode": "prefill_worker.encoder",
}
ROLES = tuple(MODULES)

# Flags that `diptych up` sets itself.
OWNED_FLAGS = frozenset(
    {
        *("grpc-port", "http-port", "admin-port", "redis-url", "secret", "ready-fd", "death-fd", "worker-id"),
        *("workers-fd", "weight-holder"),
        *("api-keys-file", "tls-cert", "tls-key", "tls-client-ca", "internal-tls", "access-log"),
        "config-digest",
        *("served-model-name", "model-split", "small-requests", "reasoning-parser", "cors-allow-origin"),
        *("chat-template", "lora", "batch-dir"),
    }
)


class BadOverride(ValueError):
    """A --set that names no role, no flag, or a flag that the launcher owns."""


@dataclass(frozen=True)
class SharedSecrets:
    """Values that processes must share to be one system; given by environment, never by command line.

    The secret is the gateways' alone: with it they name prefixes and sign resume tokens.
    """

    redis_url: str = field(repr=False)
    block_secret: str = field(repr=False)

    @property
    def of_gateways(self) -> Mapping[str, str]:
        return {**self.of_workers, "DIPTYCH_SECRET": self.block_secret}

    @property
    def of_workers(self) -> Mapping[str, str]:
        return {"DIPTYCH_REDIS_URL": self.redis_url}


def parse_override(text: str) -> tuple[str, str, str]:
    """Read ROLE.FLAG=VALUE, such as decode.max-batch=8, under any of a flag's names.

    Raises BadOverride, ValueError for an amount of memory that is none.
    """
    target, equals, value = text.partition("=")
    role, dot, flag = target.partition(".")
    name = flag.removeprefix("--").replace("-", "_")
    if not (equals and dot and name) or role not in MODULES:
        raise BadOverride(f"{text!r} is not ROLE.FLAG=VALUE with a ROLE of {', '.join(ROLES)}")
    field, value = canonical(name, value)
    flag = field.replace("_", "-")
    if flag in OWNED_FLAGS:
        raise BadOverride(f"--{flag} is chosen by the launcher")
    return role, flag, value


def switch(value: str) -> str | bool:
    """Return True or False for a switch, which takes no value (`--flag`, `--no-flag`), else the value."""
    return {"true": True, "false": False}.get(value.lower(), value)


def program_specs(
    options: StackOptions, shared: SharedSecrets, cores: int, *, worker_host: str = LOOPBACK
) -> list[ChildSpec]:
    """Return the gateway and every worker, ready to start. `cores` are dealt out to the workers, which listen
    on `worker_host`.
    """
    return [gateway_spec(options, shared), *worker_specs(options, shared, cores, worker_host=worker_host)]


def gateway_spec(options: StackOptions, shared: SharedSecrets) -> ChildSpec:
    """Return the gateway, ready to start."""
    return _spec(
        "gateway",
        "gateway",
        options,
        shared,
        {
            "host": options.host,
            "insecure": options.insecure or None,
            "api-keys-file": options.api_keys_file,
            "access-log": options.access_log,
            "tls-cert": options.tls_cert,
            "tls-key": options.tls_key,
            "tls-client-ca": options.tls_client_ca,
            "served-model-name": options.served_model_name,
            "model-split": options.model_split,
            "small-requests": options.small_requests,
            "chat-template": options.chat_template,
            "reasoning-parser": options.reasoning_parser,
            "cors-allow-origin": options.cors_allow_origin,
            "lora": options.lora,
            "max-lora-rank": options.max_lora_rank,
            "batch-dir": options.batch_dir,
            "shutdown-timeout": options.shutdown_timeout,
            "reuse-port": True,
            "auto-roles": options.auto_roles or None,
            "await-workers-s": Slot("await_workers_s"),
            "workers-fd": Slot("workers_fd"),
        },
        admin_port=admin_port_beside(options.grpc_port, options.admin_port),
        grpc_port=options.grpc_port,
        http_port=options.http_port,
    )


def worker_specs(
    options: StackOptions,
    shared: SharedSecrets,
    cores: int,
    *,
    worker_host: str = LOOPBACK,
    first_rank: int = 0,
) -> list[ChildSpec]:
    """Return every worker, ready to start: decode and prefill workers, then encode workers.

    `first_rank` is the number of workers that there are already.
    """
    on_workers: dict[str, object] = {
        "host": worker_host,  # DIPTYCH_HOST is for the gateway here
        "insecure": (options.insecure and not is_loopback(worker_host)) or None,
        "device": options.device,
        "transport": options.transport,
        "kv-cache-dtype": options.kv_cache_dtype,
        "batch-invariant": options.batch_invariant or None,
        "window-blocks": options.window_blocks or ("off" if options.kv_tier else None),
        "speculative-model": options.speculative_model,
        "max-loras": options.max_loras,
        "max-lora-rank": options.max_lora_rank,
        "worker-shutdown-timeout": options.worker_shutdown_timeout,
        "sum-parts": common_parts(options),
        "role-changes": role_changes(options),
        "weight-holder": Slot("weight_holder"),
    }
    workers = [
        _worker(place, of_model(options, place.model), shared, on_workers)
        for place in worker_places(options, cores, first_rank)
    ]
    sharing = sharing_of(options)
    return [
        *(workers if sharing is None else pair_up(workers, sharing, options)),
        *(
            _encoder(number, of_model(options, model), shared, cores)
            for number, model in enumerate(encoded_models(options))
        ),
    ]


def _encoder(number: int, options: StackOptions, shared: SharedSecrets, cores: int) -> ChildSpec:
    """Return an encode worker's specification."""
    own: dict[str, object] = {
        "host": LOOPBACK,
        "device": options.device,
        "threads": encode_threads(options, cores),
        "worker-shutdown-timeout": options.worker_shutdown_timeout,
    }
    return replace(_spec(f"encode-{number}", "encode", options, shared, own), model=options.model)


def _worker(
    place: WorkerPlace, options: StackOptions, shared: SharedSecrets, on_workers: Mapping[str, object]
) -> ChildSpec:
    """Return a worker's specification, with what starts it in either role."""
    either: dict[str, ChildSpec] = {
        role: _spec(place.name, role, options, shared, {**place.flags(role, options), **on_workers})
        for role in WORKER_ROLES
    }
    return replace(either[place.role], roles=either, model=options.model)


def of_model(options: StackOptions, model: NamedModel) -> StackOptions:
    """Return the options of the workers of one model."""
    return replace(options, model=model.path, model_name=model.name or options.model_name)


def common_parts(options: StackOptions) -> int | None:
    """Return the fewest parts that every role's --tensor-parallel and --sum-parts divide; None for one."""
    chosen = [value for _, flag, value in options.overrides if flag in ("tensor-parallel", "sum-parts")]
    parts = math.lcm(*(int(value) or 1 for value in chosen if value.isdecimal()))
    return parts if parts > 1 else None


def _spec(
    name: str,
    role: str,
    options: StackOptions,
    shared: SharedSecrets,
    own: Mapping[str, object],
    *,
    grpc_port: int = 0,
    http_port: int = 0,
    admin_port: int | None = None,
) -> ChildSpec:
    overrides: dict[str, object] = {
        flag: switch(value) for target, flag, value in options.overrides if target == role
    }
    decides = {"dtype", "quantization"} & overrides.keys()  # one choice: an override of one decides both
    flags: dict[str, object] = {
        "model": options.model,
        "mmproj": options.mmproj,
        "model-name": options.model_name,
        "max-model-len": options.max_model_len,
        "dtype": "auto" if decides else options.dtype,
        "quantization": "auto" if decides else options.quantization,
        "block-size": options.block_size,
        "log-level": options.log_level,
        "internal-tls": certificates_of(options, role),
        **own,
        "config-digest": options.config_digest,
        **overrides,
    }
    argv: list[str | Slot] = [*module_command(MODULES[role])]
    for flag, value in flags.items():
        if value is True:
            argv.append(f"--{flag}")
        elif value is False:
            argv.append(f"--no-{flag}")
        elif value is not None:
            argv += [f"--{flag}", value if isinstance(value, Slot) else str(value)]
    values: dict[str, int] = {"grpc_port": grpc_port, "http_port": http_port}
    if admin_port is not None:
        values["admin_port"] = admin_port
    ports = tuple(values)
    if role == "gateway":
        values["await_workers_s"] = 0  # when everything starts at once, the gateway is there first
    slots = () if role == "gateway" else ("replaces",)
    for slot in (*ports, "worker_id", *slots, "ready_fd", "death_fd"):
        argv += [f"--{slot.replace('_', '-')}", Slot(slot)]
    return ChildSpec(
        name=name,
        role=role,
        argv=tuple(argv),
        env=shared.of_gateways if role == "gateway" else shared.of_workers,
        values=values,
        # A gateway is known by its address; workers are found through the directory, and a new port
        # sets the new process apart from the old one.
        keep=ports if role == "gateway" else (),
        # A gateway's port is public: a client that takes all its connections must not have it killed.
        health=None
        if role == "gateway"
        else partial(_healthy, reachable(str(flags["host"])), flags["internal-tls"] is not None),
    )


def certificates_of(options: StackOptions, role: str) -> Path | None:
    """Return the folder of a role's certificate: that of its name where there is one."""
    if options.internal_tls is None or options.internal_tls == AUTO_TLS:  # made when the system starts
        return None
    folder = Path(options.internal_tls)
    return own if (own := folder / role).is_dir() else folder


async def _healthy(host: str, tls: bool, announced: Announcement) -> bool:
    """Return whether a worker is alive by its own /health."""
    port = int(announced["http_port"])
    return await http_status(host, port, "/health", tls=tls, timeout_s=_HEALTH_TIMEOUT_S) == 200
