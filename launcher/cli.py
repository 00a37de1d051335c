"""The `diptych` command. Every sub-command is a thin shell over one file of this folder."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from gateway.config import GRPC_PORT, HTTP_PORT, admin_port_beside
from launcher.key import key
from launcher.stack import LOOPBACK, BadOverride, StackOptions, parse_override

ADMIN_PORT = admin_port_beside(GRPC_PORT, None)

app = typer.Typer(
    name="diptych",
    help="Disaggregated LLM inference over gRPC: prefill and decode in separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(key)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def up(
    prefill_workers: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode_workers: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    model: Annotated[
        str, typer.Option(envvar="DIPTYCH_MODEL", help="GGUF file, Hugging Face folder, or 'bundled'.")
    ] = "bundled",
    model_name: Annotated[
        str | None, typer.Option(envvar="DIPTYCH_MODEL_NAME", help="Name the model is served under.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            envvar="DIPTYCH_DTYPE",
            help="auto, fp32, bf16, int8 or gguf (the file's own blocks); fp16 on GPUs.",
        ),
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(
            envvar="DIPTYCH_DEVICE",
            help="Where workers compute: cpu, cuda, cuda:N; auto = a GPU if there is one.",
        ),
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Of a GPU, per decode worker; default: a share of 0.90."),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="DIPTYCH_HOST", help="Address the gateway listens on.")
    ] = LOOPBACK,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="DIPTYCH_GRPC_PORT", help="0 = any free one.")
    ] = GRPC_PORT,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="DIPTYCH_HTTP_PORT", help="0 = any free one.")
    ] = HTTP_PORT,
    admin_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, envvar="DIPTYCH_ADMIN_PORT", help="For operators; default: --grpc-port + 1."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="DIPTYCH_INSECURE", help="Allow a host that is not loopback.")
    ] = False,
    api_keys_file: Annotated[
        Path | None, typer.Option(envvar="DIPTYCH_API_KEYS_FILE", help="Ask for keys: see `diptych key new`.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="DIPTYCH_TLS_CERT", help="PEM certificate of the gateway's ports.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="DIPTYCH_TLS_KEY", help="Its PEM key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(envvar="DIPTYCH_TLS_CLIENT_CA", help="Clients need certificates that these sign."),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(envvar="DIPTYCH_REDIS_URL", help="Use this server, start no Valkey.")
    ] = None,
    prefill_threads: Annotated[int | None, typer.Option(min=1, help="Per worker; default: a share.")] = None,
    decode_threads: Annotated[int | None, typer.Option(min=1, help="Per worker; default: a share.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Tokens per prefill step.")] = None,
    kv_memory_mib: Annotated[int | None, typer.Option(help="KV memory of each decode worker.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="The same as a number of blocks.")] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="How keys and values are kept: auto = as computed; fp8 is for GPUs.")
    ] = "auto",
    transport: Annotated[
        str | None, typer.Option(help="auto, shared_memory, cuda_ipc, nccl, gloo or tcp.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Any other flag: ROLE.FLAG=VALUE (decode.max-batch=8).")
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar="DIPTYCH_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    ready_file: Annotated[
        Path | None, typer.Option(help="Write ports, pids and secrets here as JSON once everything serves.")
    ] = None,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Print how another gateway joins, secrets included.")
    ] = False,
) -> None:
    """Run everything on this machine: Valkey, a gateway, prefill and decode workers. Ctrl-C stops all.

    The key of the block hashes is random; DIPTYCH_SECRET (hexadecimal) sets it.
    """
    from launcher.serve import serve  # rich and asyncio only where they are needed: --help stays quick

    options = StackOptions(
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        model=model,
        model_name=model_name,
        dtype=dtype,
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        admin_port=admin_port,
        insecure=insecure,
        api_keys_file=api_keys_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        redis_url=redis_url,
        secret=os.environ.get("DIPTYCH_SECRET"),
        prefill_threads=prefill_threads,
        decode_threads=decode_threads,
        block_size=block_size,
        prefill_chunk=prefill_chunk,
        kv_memory_mib=kv_memory_mib,
        kv_blocks=kv_blocks,
        kv_cache_dtype=kv_cache_dtype,
        transport=transport,
        log_level=log_level,
        overrides=_overrides(overrides or ()),
    )
    raise typer.Exit(serve(options, ready_file=ready_file, show_secrets=show_secrets))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run one gateway alone (gRPC 50051, HTTP 8000). `diptych gateway --help` lists its flags."""
    _become("gateway", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def prefill(context: typer.Context) -> None:
    """Run one prefill worker alone. `diptych prefill --help` lists its flags."""
    _become("prefill_worker", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def decode(context: typer.Context) -> None:
    """Run one decode worker alone. `diptych decode --help` lists its flags."""
    _become("decode_worker", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Put load on a running server and measure it. `diptych bench --help` lists its flags."""
    _become("benchmarks", context.args)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; '-' reads standard input.")],
    address: Annotated[
        str, typer.Option(envvar="DIPTYCH_ADDRESS", help="host:port of a gateway.")
    ] = f"127.0.0.1:{GRPC_PORT}",
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show where the time went.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System turn of the chat.")] = None,
    model: Annotated[str | None, typer.Option(help="Served name; default: the server's first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds.")] = None,
) -> None:
    """Ask a running server once."""
    from launcher.ask import Question, ask

    question = Question(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        raw=raw,
        system=system,
        model=model,
        timeout_s=timeout,
        options={
            name: value
            for name, value in {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "seed": seed,
                "stop": stop or None,
            }.items()
            if value is not None
        },
    )
    raise typer.Exit(ask(address, question, stream=stream, timings=timings))


_AdminAddress = Annotated[
    str,
    typer.Option("--address", envvar="DIPTYCH_ADMIN_ADDRESS", help="host:port of a gateway's admin port."),
]


@app.command()
def workers(address: _AdminAddress = f"127.0.0.1:{ADMIN_PORT}") -> None:
    """List the workers of a running gateway: which are usable, why not, and how loaded they are."""
    from launcher.operate import list_workers

    raise typer.Exit(list_workers(address))


@app.command()
def drain(
    worker_id: Annotated[str, typer.Argument(help="As `diptych workers` names it.")],
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds for what runs; default: its own.")
    ] = None,
    address: _AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Let a worker take nothing new, finish or hand back what it runs, and exit."""
    from launcher.operate import drain_worker

    raise typer.Exit(drain_worker(address, worker_id, grace))


@app.command()
def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="As `decode-0`, `gateway`; none: every process.")
    ] = None,
    grpc_port: Annotated[int, typer.Option(help="Public port of the system.")] = GRPC_PORT,
) -> None:
    """Replace processes of a running `diptych up` one after the other, without refusing a request."""
    from launcher.operate import restart_processes

    raise typer.Exit(restart_processes(grpc_port, names or []))


@app.command()
def flush(
    worker_id: Annotated[str, typer.Argument(help="Empty: every decode worker.")] = "",
    address: _AdminAddress = f"127.0.0.1:{ADMIN_PORT}",
) -> None:
    """Let decode workers forget the cached prefixes that no running request holds."""
    from launcher.operate import flush_prefix_cache

    raise typer.Exit(flush_prefix_cache(address, worker_id))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France?",
    model: Annotated[str, typer.Option(help="GGUF file, Hugging Face folder, or 'bundled'.")] = "bundled",
    prefill_workers: Annotated[int, typer.Option(min=1)] = 1,
    decode_workers: Annotated[int, typer.Option(min=1)] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the processes log.")] = False,
) -> None:
    """Start everything on free ports, stream one answer, show where its time went, stop everything."""
    from launcher.demo import run_demo

    options = StackOptions(
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        model=model,
        log_level="info" if verbose else "warning",
    )
    raise typer.Exit(run_demo(prompt, options, verbose=verbose))


@app.command()
def doctor() -> None:
    """Check that this machine has what Diptych needs. Exit status 1 when something essential is missing."""
    from launcher.doctor import run_doctor

    raise typer.Exit(run_doctor((GRPC_PORT, HTTP_PORT)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("diptych"))


def main() -> None:
    """Entry point of the `diptych` command."""
    app()


def _become(module: str, argv: Sequence[str]) -> None:
    """Replaces this process by the program: signals and exit status are its own, as in a container."""
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])


def _overrides(texts: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    try:
        return tuple(parse_override(text) for text in texts)
    except BadOverride as error:
        raise typer.BadParameter(str(error), param_hint="--set") from None
