"""Processes of Diptych on one machine, and their flags."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from diptych.cli.child import Announcement, ChildSpec, Slot
from diptych.cli.http_probe import http_status, reachable
from diptych.cli.stack_options import LOOPBACK, StackOptions
from diptych.runtime.flag_names import canonical
from diptych.runtime.python_module import module_command
from gateway.config import admin_port_beside

_HEALTH_TIMEOUT_S = 5.0
MODULES = {"gateway": "gateway", "prefill": "prefill_worker", "decode": "decode_worker"}
ROLES = tuple(MODULES)

_GPU_UTILIZATION = 0.9

# Flags that `diptych up` sets itself.
OWNED_FLAGS = frozenset(
    {
        *("grpc-port", "http-port", "admin-port", "redis-url", "secret", "ready-fd", "death-fd", "worker-id"),
        *("workers-fd", "weight-holder"),
        *("api-keys-file", "tls-cert", "tls-key", "tls-client-ca", "config-digest"),
        *("served-model-name", "reasoning-parser", "cors-allow-origin", "chat-template", "lora", "batch-dir"),
    }
)


@dataclass(frozen=True)
class ThreadPlan:
    """Threads of each prefill and each decode worker, in the order of their names."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    def homes(self, cores: int) -> "tuple[tuple[range, ...], tuple[range, ...]] | None":
        """Return the home cores of each worker, to be lent between them; None when there are too few."""
        ends = list(itertools.accumulate((*self.prefill, *self.decode)))
        if ends[-1] > cores:
            return None
        homes = tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
        return homes[: len(self.prefill)], homes[len(self.prefill) :]


def split_cores(cores: int, prefill_workers: int, decode_workers: int) -> ThreadPlan:
    """Deal the cores out, one after the other, prefill first (it is bound by arithmetic); at least one each.

    Workers that shared cores would wait for one another inside every layer: their threads meet at
    barriers, and a barrier is as late as its latest thread.
    """
    workers = prefill_workers + decode_workers
    shares = [max(1, cores // workers + (1 if index < cores % workers else 0)) for index in range(workers)]
    return ThreadPlan(tuple(shares[:prefill_workers]), tuple(shares[prefill_workers:]))


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


def program_specs(options: StackOptions, shared: SharedSecrets, cores: int) -> list[ChildSpec]:
    """Return the gateway and every worker, ready to start. `cores` are dealt out to the workers."""
    plan = split_cores(cores, options.prefill_workers, options.decode_workers)
    # A chosen number of threads is that number: no core is lent.
    chosen = options.prefill_threads or options.decode_threads
    homes = None if chosen else plan.homes(cores)
    on_workers = {
        "host": LOOPBACK,  # DIPTYCH_HOST is for the gateway here
        "device": options.device,
        "transport": options.transport,
        "kv-cache-dtype": options.kv_cache_dtype,
        "speculative-model": options.speculative_model,
        "max-loras": options.max_loras,
        "max-lora-rank": options.max_lora_rank,
        "worker-shutdown-timeout": options.worker_shutdown_timeout,
        "sum-parts": common_parts(options),
        "weight-holder": Slot("weight_holder"),
    }
    gateway = _spec(
        "gateway",
        "gateway",
        options,
        shared,
        {
            "host": options.host,
            "insecure": options.insecure or None,
            "api-keys-file": options.api_keys_file,
            "tls-cert": options.tls_cert,
            "tls-key": options.tls_key,
            "tls-client-ca": options.tls_client_ca,
            "served-model-name": options.served_model_name,
            "chat-template": options.chat_template,
            "reasoning-parser": options.reasoning_parser,
            "cors-allow-origin": options.cors_allow_origin,
            "lora": options.lora,
            "max-lora-rank": options.max_lora_rank,
            "batch-dir": options.batch_dir,
            "shutdown-timeout": options.shutdown_timeout,
            "reuse-port": True,
            "await-workers-s": Slot("await_workers_s"),
            "workers-fd": Slot("workers_fd"),
        },
        admin_port=admin_port_beside(options.grpc_port, options.admin_port),
        grpc_port=options.grpc_port,
        http_port=options.http_port,
    )
    prefill = [
        _spec(
            f"prefill-{index}",
            "prefill",
            options,
            shared,
            {
                "threads": options.prefill_threads or threads,
                **_share(homes and homes[0][index], cores),
                "prefill-chunk": options.prefill_chunk,
                **on_workers,
            },
        )
        for index, threads in enumerate(plan.prefill)
    ]
    decode = [
        _spec(
            f"decode-{index}",
            "decode",
            options,
            shared,
            {
                "threads": options.decode_threads or threads,
                **_share(homes and homes[1][index], cores),
                "speculative-tokens": options.speculative_tokens,
                "kv-memory-mib": options.kv_memory_mib,
                "kv-blocks": options.kv_blocks,
                "kv-tier": options.kv_tier,
                "gpu-memory-utilization": options.gpu_memory_utilization or _gpu_share(options),
                **on_workers,
            },
        )
        for index, threads in enumerate(plan.decode)
    ]
    return [gateway, *decode, *prefill]


def common_parts(options: StackOptions) -> int | None:
    """Return the fewest parts that every role's --tensor-parallel and --sum-parts divide; None for one."""
    chosen = [value for _, flag, value in options.overrides if flag in ("tensor-parallel", "sum-parts")]
    parts = math.lcm(*(int(value) or 1 for value in chosen if value.isdecimal()))
    return parts if parts > 1 else None


def _gpu_share(options: StackOptions) -> float | None:
    """Return the share of a GPU that each decode worker takes, when all workers of this machine are on one.

    A prefill worker has weights and one step's numbers but no blocks: it counts as a quarter. To put
    workers on GPUs of their own, give what each may take.
    """
    if options.device == "cpu":
        return None
    return round(_GPU_UTILIZATION / (options.decode_workers + options.prefill_workers / 4), 3)


def _share(home: range | None, cores: int) -> dict[str, object]:
    """Return the flags by which a worker lends its idle cores and borrows those of others."""
    if home is None:
        return {}
    return {"cores-fd": Slot("cores_fd"), "home-cores": ",".join(map(str, home)), "machine-cores": cores}


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
        "model-name": options.model_name,
        "max-model-len": options.max_model_len,
        "dtype": "auto" if decides else options.dtype,
        "quantization": "auto" if decides else options.quantization,
        "block-size": options.block_size,
        "log-level": options.log_level,
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
        health=None if role == "gateway" else partial(_healthy, reachable(str(flags["host"]))),
    )


async def _healthy(host: str, announced: Announcement) -> bool:
    """Return whether a worker is alive by its own /health."""
    port = int(announced["http_port"])
    return await http_status(host, port, "/health", timeout_s=_HEALTH_TIMEOUT_S) == 200
