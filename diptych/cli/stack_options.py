"""Options of `diptych up`, and the decorator by which a command takes all of them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from diptych.runtime.cli_flags import CONFIG_HELP, CONFIG_SECTION, SettingRow, other_flags
from diptych.runtime.flag_names import RENAMED, SYNONYMS
from diptych.runtime.settings_sources import DEFAULT, VARIABLE_PREFIX, flag_of
from diptych.worker_process.config import MAX_THREADS

LOOPBACK = "127.0.0.1"
AUTO_TLS = "auto"
"""Value of --internal-tls that makes certificates for this run."""


def _option(text: str, section: str, **rules: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=section, **rules)


def _threads(role: str) -> Any:
    text = f"Compute threads of each {role} worker; default: a share of the cores."
    return _option(text, "Compute", min=1, max=MAX_THREADS)


@dataclass(frozen=True)
class StackOptions:
    """Options of a whole system.

    Ports may be 0 (any free one); None leaves a setting to the program's own default.

    A field with an option is a flag of `diptych up`, a variable (`--redis-url` is DIPTYCH_REDIS_URL) and a
    key of the configuration file.
    """

    prefill_workers: Annotated[int, _option("Prefill workers of each model.", "Processes", min=1)] = 1
    decode_workers: Annotated[int, _option("Decode workers of each model.", "Processes", min=1)] = 1
    encode_workers: Annotated[
        int,
        _option("Encode workers of each model with images; 0: prefill workers encode.", "Processes", min=0),
    ] = 0
    auto_roles: Annotated[
        bool,
        typer.Option(
            "--auto-roles",
            help="Let workers change between prefill and decode as the load asks for it.",
            rich_help_panel="Processes",
        ),
    ] = False
    model: Annotated[
        str,
        _option(
            "GGUF file or Hugging Face folder, or 'bundled'; NAME=PATH for each of several models.",
            "Model",
        ),
    ] = "bundled"
    mmproj: Annotated[
        Path | None,
        _option(
            "GGUF file with the encoder of a GGUF model's images; default: the mmproj file beside it.",
            "Model",
        ),
    ] = None
    model_name: Annotated[
        str | None,
        _option("Name the model is served under; default: that of its folder or file.", "Model"),
    ] = None
    served_model_name: Annotated[
        str | None,
        _option("Names the model is served under, all of them listed; --model-name comes before.", "Model"),
    ] = None
    model_split: Annotated[
        str | None,
        _option("Name that stands for models by weight: NAME=MODEL:90,MODEL:10; may be repeated.", "Model"),
    ] = None
    small_requests: Annotated[
        str | None,
        _option("Prompts that a smaller model answers, as NAME=MODEL:BYTES; may be repeated.", "Model"),
    ] = None
    chat_template: Annotated[
        Path | None, _option("File with the chat template in place of the model's own ones.", "Model")
    ] = None
    max_model_len: Annotated[
        int | None, _option("Most tokens of prompt and output; default: the model's.", "Model", min=1)
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _option("Form in which the model marks its reasoning; default: as its template says.", "Model"),
    ] = None
    lora: Annotated[
        str | None,
        _option("LoRA adapter to serve, as NAME=PATH; may be repeated.", "LoRA"),
    ] = None
    max_loras: Annotated[
        int | None,
        _option("LoRA adapters that one step can compute at once; 0 = none.", "LoRA", min=0, max=256),
    ] = None
    max_lora_rank: Annotated[
        int | None, _option("Largest rank of a LoRA adapter.", "LoRA", min=1, max=512)
    ] = None
    dtype: Annotated[
        str,
        _option(
            "Computation type: auto (the fastest that keeps the quality), fp32, bf16, or fp16 on GPUs.",
            "Model",
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        _option(
            "Quantised computation instead of --dtype: int8, gguf (own blocks, on CPUs), fp8 (on GPUs).",
            "Model",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Compute a token with the same bits alone and in any batch; costs speed on GPUs.",
            rich_help_panel="Compute",
        ),
    ] = False
    device: Annotated[
        str,
        _option(
            "Device of the workers: cpu, cuda or cuda:N; auto takes a GPU if there is one.",
            "Compute",
        ),
    ] = "auto"
    gpu_sharing: Annotated[
        str,
        _option(
            "Prefill and decode workers on one GPU: off (a process each), or in one process by turns, "
            "streams, partition or partition:N; auto is off.",
            "Compute",
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float | None,
        _option(
            "Share of a GPU's memory that each decode worker takes; default: its part of 0.90.",
            "KV cache",
            min=0.01,
            max=1.0,
        ),
    ] = None
    host: Annotated[str, _option("Address the gateway listens on.", "Network")] = LOOPBACK
    grpc_port: Annotated[
        int, _option("Public gRPC port; 0 takes any free one.", "Network", min=0, max=65535)
    ] = 0
    http_port: Annotated[
        int,
        _option("Port of OpenAI's API and of /metrics; 0 takes any free one.", "Network", min=0, max=65535),
    ] = 0
    admin_port: Annotated[
        int | None,
        _option("gRPC port for operators; default: --grpc-port + 1.", "Network", min=0, max=65535),
    ] = None
    cors_allow_origin: Annotated[
        str | None,
        _option("Origins whose pages may call the HTTP API from a browser; * is any.", "Network"),
    ] = None
    batch_dir: Annotated[
        Path | None,
        _option("Folder of /v1/files and /v1/batches; without it there are none.", "Batches"),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow a host that is not loopback without TLS.",
            rich_help_panel="Network",
        ),
    ] = False
    api_keys_file: Annotated[
        Path | None, _option("API keys, as `diptych key new` writes them.", "Security")
    ] = None
    tls_cert: Annotated[Path | None, _option("PEM certificate chain of the gateway's ports.", "Security")] = (
        None
    )
    tls_key: Annotated[Path | None, _option("PEM key of --tls-cert.", "Security")] = None
    tls_client_ca: Annotated[
        Path | None,
        _option("PEM certificates that sign clients' certificates; with it, clients need one.", "Security"),
    ] = None
    internal_tls: Annotated[
        str | None,
        _option(
            "TLS between the programs: auto makes certificates, a folder has them, one a role.", "Security"
        ),
    ] = None
    redis_url: Annotated[
        str | None, _option("Use this Redis-protocol server; default: start Valkey.", "Processes")
    ] = None
    prefill_threads: Annotated[int | None, _threads("prefill")] = None
    decode_threads: Annotated[int | None, _threads("decode")] = None
    encode_threads: Annotated[int | None, _threads("encode")] = None
    block_size: Annotated[int | None, _option("Tokens per KV block.", "KV cache")] = None
    prefill_chunk: Annotated[int | None, _option("Tokens of a prefill step.", "Compute")] = None
    speculative_model: Annotated[
        str | None,
        _option(
            "Draft model with the same vocabulary, Medusa or EAGLE heads, or mtp: the model's own layers.",
            "Speculative decoding",
        ),
    ] = None
    speculative_tree: Annotated[
        str | None,
        _option(
            "Branches at each depth of the trees that heads draft, as in 4,2,1.",
            "Speculative decoding",
        ),
    ] = None
    speculative_tokens: Annotated[
        int | None,
        _option("Most tokens drafted for a sequence in a step.", "Speculative decoding", min=0, max=15),
    ] = None
    kv_memory_mib: Annotated[
        int | None, _option("Memory of each decode worker's KV block pool in MiB.", "KV cache")
    ] = None
    kv_blocks: Annotated[
        int | None, _option("Blocks of that pool, instead of --kv-memory-mib.", "KV cache")
    ] = None
    kv_tier: Annotated[
        str | None,
        _option(
            "Tiers for blocks beyond the pool: ram:SIZE, disk:FOLDER:SIZE, redis://…, s3://…; several.",
            "KV cache",
        ),
    ] = None
    kv_events: Annotated[
        str | None,
        _option(
            "Publish what prefix caches hold, with token ids, for routers of others: ipc://FILE, or "
            "tcp://127.0.0.1:PORT?password-file=FILE.",
            "KV cache",
        ),
    ] = None
    kv_events_topic: Annotated[str | None, _option("Topic of these events.", "KV cache")] = None
    kv_cache_dtype: Annotated[
        str | None,
        _option("Type of cached keys and values: auto, fp8 on GPUs, or int8 on CPUs.", "KV cache"),
    ] = None
    window_blocks: Annotated[
        str | None,
        _option(
            "Blocks behind a sliding window: auto frees them where it can, and without --kv-tier; off keeps "
            "them.",
            "KV cache",
        ),
    ] = None
    transport: Annotated[
        str | None,
        _option(
            "Transport of KV blocks: auto, shared_memory, cuda_ipc, nccl, gloo or tcp.",
            "KV cache",
        ),
    ] = None
    shutdown_timeout: Annotated[
        float,
        _option("Seconds that running requests get to finish at the end.", "Shutdown", min=0, max=3600),
    ] = 8.0
    worker_shutdown_timeout: Annotated[
        float,
        _option(
            "Seconds that they get when one worker leaves alone, as for a restart.",
            "Shutdown",
            min=0,
            max=3600,
        ),
    ] = 8.0
    log_level: Annotated[
        str, _option("Least severe records that are logged: debug, info, warning or error.", "Logging")
    ] = "info"
    access_log: Annotated[
        str | None,
        _option("File that gets a line of JSON for each call; - is standard output.", "Logging"),
    ] = None
    secret: str | None = None
    overrides: tuple[tuple[str, str, str], ...] = ()
    """(role, flag, value): any other flag of a program."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Origin by field, or an override's role.field: `--dtype`, `DIPTYCH_DTYPE`, `serving.yaml:3`, `--set`."""
    config_digest: str | None = None

    def origin(self, name: str) -> str:
        """Return the origin of a field, or of an override by role.field."""
        return self.origins.get(name, DEFAULT)


def _kind_of(kind: Any) -> str:
    """Return a flag's type in words, None left out."""
    kinds = {int: "integer", float: "number", bool: "switch", str: "text", Path: "path"}
    [name] = [kinds[one] for one in (get_args(kind) or (kind,)) if one in kinds]
    return name


_HINTS = get_type_hints(StackOptions, include_extras=True)
FLAG_FIELDS = tuple(name for name, hint in _HINTS.items() if hasattr(hint, "__metadata__"))
"""The fields that are flags, variables and keys."""
OVERRIDES, ORIGINS = "diptych.overrides", "diptych.origins"
"""Keys of a command's `Context.meta`: what a configuration file says to programs, and origins of values."""

for _kind, _flag in (get_args(_HINTS[name]) for name in FLAG_FIELDS):
    _flag.metavar = _kind_of(_kind) if _kind is not bool else None

_CONFIG = Annotated[Path | None, _option(CONFIG_HELP, CONFIG_SECTION)]
_SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set any other flag: ROLE.FLAG=VALUE (decode.max-batch=8).", rich_help_panel="Processes"
    ),
]


def option_rows(**defaults: Any) -> Iterator[SettingRow]:
    """Yield the settings of `diptych up`, with the defaults of the command where they differ."""
    yield SettingRow("--config", "", "path", "", CONFIG_HELP, CONFIG_SECTION)
    given = {one.name: one.default for one in dataclasses.fields(StackOptions)} | defaults
    for name in FLAG_FIELDS:
        kind, option = get_args(_HINTS[name])
        default = given[name]
        yield SettingRow(
            flag=f"--{flag_of(name)}",
            variable=f"{VARIABLE_PREFIX}{name.upper()}",
            type=_type_of(kind, option),
            default="" if default is None else str(default).lower() if default is False else str(default),
            description=option.help,
            section=option.rich_help_panel,
            old_names=other_flags(RENAMED, name),
            synonyms=other_flags(SYNONYMS, name),
        )


def _type_of(kind: Any, option: Any) -> str:
    """Return a flag's type and bounds, as `integer 0–65535`."""
    name = _kind_of(kind)
    if option.min is not None and option.max is not None:
        return f"{name} {option.min}–{option.max}"
    return name if option.min is None else f"{name} ≥{option.min}"


def takes_stack_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its first parameter is a `StackOptions`, its flags are the fields of one.

    The command's class must be `StackCommand`, which reads variables and the configuration file.

    Args:
        defaults: by field, where the command's is another one.
    """
    fields = {one.name: one for one in dataclasses.fields(StackOptions)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags = [
        inspect.Parameter(
            name, keyword, default=defaults.get(name, fields[name].default), annotation=_HINTS[name]
        )
        for name in FLAG_FIELDS
    ]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, **given: Any) -> None:
            from diptych.cli.stack_command import stack_overrides

            given.pop("config")
            overrides, origins = stack_overrides(context, given.pop("sets") or ())
            options = StackOptions(
                **{name: given.pop(name) for name in FLAG_FIELDS},
                overrides=overrides,
                origins=context.meta.get(ORIGINS, {}) | origins,
            )
            command(options, **given)

        _, *own = inspect.signature(command).parameters.values()
        parameters = [
            inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            inspect.Parameter("config", keyword, default=None, annotation=_CONFIG),
            *flags,
            inspect.Parameter("sets", keyword, default=None, annotation=_SET),
            *(one.replace(kind=keyword) for one in own),
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap
