"""What `diptych up` runs, option by option; and how a command takes all of them without naming them again."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

from diptych.worker_process.config import MAX_THREADS

LOOPBACK = "127.0.0.1"

# The variable is what the workers themselves call it.
_THREADS = Option(min=1, max=MAX_THREADS, envvar="DIPTYCH_THREADS", help="Per worker; default: a share.")


@dataclass(frozen=True)
class StackOptions:
    """What to run. Ports may be 0 (any free one); None leaves a setting to the program's own default.

    A field with an `Option` is a flag of `diptych up`, and a variable: `--redis-url` is DIPTYCH_REDIS_URL.
    """

    prefill_workers: Annotated[int, Option(min=1, help="Prefill workers.")] = 1
    decode_workers: Annotated[int, Option(min=1, help="Decode workers.")] = 1
    model: Annotated[str, Option(help="GGUF file, Hugging Face folder, or 'bundled'.")] = "bundled"
    model_name: Annotated[str | None, Option(help="Name the model is served under.")] = None
    max_model_len: Annotated[
        int | None, Option(min=1, help="Most tokens of prompt and output; default: the model's.")
    ] = None
    dtype: Annotated[
        str,
        Option(
            help="auto, fp32, bf16, int8 or gguf (the file's own blocks); fp16 on GPUs.",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            help="Where workers compute: cpu, cuda, cuda:N; auto = a GPU if there is one.",
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float | None,
        Option(min=0.01, max=1.0, help="Of a GPU, per decode worker; default: a share of 0.90."),
    ] = None
    host: Annotated[str, Option(help="Address the gateway listens on.")] = LOOPBACK
    grpc_port: Annotated[int, Option(min=0, max=65535, help="0 = any free one.")] = 0
    http_port: Annotated[
        int,
        Option(min=0, max=65535, help="OpenAI's API, metrics; 0 = any free one."),
    ] = 0
    admin_port: Annotated[
        int | None,
        Option(min=0, max=65535, help="For operators; default: --grpc-port + 1."),
    ] = None
    insecure: Annotated[bool, Option("--insecure", help="Allow a host that is not loopback.")] = False
    api_keys_file: Annotated[Path | None, Option(help="Ask for keys: see `diptych key new`.")] = None
    tls_cert: Annotated[Path | None, Option(help="PEM certificate of the gateway's ports.")] = None
    tls_key: Annotated[Path | None, Option(help="Its PEM key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(help="Clients need certificates that these sign."),
    ] = None
    redis_url: Annotated[str | None, Option(help="Use this server, start no Valkey.")] = None
    prefill_threads: Annotated[int | None, _THREADS] = None
    decode_threads: Annotated[int | None, _THREADS] = None
    block_size: Annotated[int | None, Option(help="Tokens per KV block.")] = None
    prefill_chunk: Annotated[int | None, Option(help="Tokens per prefill step.")] = None
    kv_memory_mib: Annotated[int | None, Option(help="KV memory of each decode worker.")] = None
    kv_blocks: Annotated[int | None, Option(help="The same as a number of blocks.")] = None
    kv_cache_dtype: Annotated[
        str | None, Option(help="How keys and values are kept: auto = as computed; fp8 is for GPUs.")
    ] = None
    transport: Annotated[str | None, Option(help="auto, shared_memory, cuda_ipc, nccl, gloo or tcp.")] = None
    drain_grace_s: Annotated[
        float, Option(min=0, max=3600, help="Seconds that running requests get at the end.")
    ] = 8.0
    drain_s: Annotated[
        float, Option(min=0, max=3600, help="The same of a worker that leaves alone, for a restart.")
    ] = 8.0
    log_level: Annotated[str, Option(help="debug, info, warning or error.")] = "info"
    secret: str | None = None
    overrides: tuple[tuple[str, str, str], ...] = ()
    """(role, flag, value): any other flag of a program."""


def _with_variable(name: str, hint: Any) -> Any:
    """The annotation of a flag, with the variables that it is read from as well."""
    kind, option = get_args(hint)
    option = copy.copy(option)
    others = [option.envvar] if option.envvar else []
    option.envvar = [f"DIPTYCH_{name.upper()}", *others]
    return Annotated[kind, option]


def takes_stack_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: its first parameter is a `StackOptions`, its flags are the fields of one.

    Args:
        defaults: by field, where the command's is another one.
    """
    hints = get_type_hints(StackOptions, include_extras=True)
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=_with_variable(field.name, hints[field.name]),
        )
        for field in dataclasses.fields(StackOptions)
        if hasattr(hints[field.name], "__metadata__")
    ]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            options = StackOptions(**{flag.name: given.pop(flag.name) for flag in flags})
            command(options, **given)

        _, *own = inspect.signature(command).parameters.values()
        parameters = [*flags, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap
