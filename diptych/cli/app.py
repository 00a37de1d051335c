"""The `diptych` command. Every sub-command is a thin shell over one file of this folder."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal

import typer

from diptych.cli.address_options import ADMIN_PORT, target, utf8
from diptych.cli.api_key_command import key
from diptych.cli.certificates_command import certificates
from diptych.cli.lora_command import lora
from diptych.cli.model_command import model as model_group
from diptych.cli.operate_command import drain, flush, restart, role, top, workers
from diptych.cli.plan_command import plan
from diptych.cli.stack import MODULES
from diptych.cli.stack_command import StackCommand
from diptych.cli.stack_options import StackOptions, takes_stack_options
from diptych.cli.units_command import units
from diptych.runtime.env import renamed_variables, unknown_variables
from diptych.runtime.python_module import module_command
from diptych.runtime.settings_sources import join_lists
from gateway.ports import GRPC_PORT, HTTP_PORT

app = typer.Typer(
    name="diptych",
    help="Disaggregated LLM inference over gRPC: prefill and decode in separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LogLevel = Literal["debug", "info", "warning", "error"]
_SERVE, _USE, _OPERATE, _CHECK = "Serve", "Use", "Operate", "Check and measure"
app.add_typer(key, rich_help_panel=_OPERATE)
app.add_typer(model_group, rich_help_panel=_OPERATE)
app.command(rich_help_panel=_CHECK)(plan)
app.command(rich_help_panel=_OPERATE)(certificates)
app.command(rich_help_panel=_OPERATE)(units)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("diptych"))
        raise typer.Exit


@app.callback()
def _before_each(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # The programs warn themselves: they are started in other ways as well.
    if context.invoked_subcommand not in MODULES:
        for line in (*renamed_variables(), unknown_variables()):
            if line is not None:
                print(f"diptych: {line}", file=sys.stderr)


@app.command(cls=StackCommand, rich_help_panel=_SERVE)
@takes_stack_options(grpc_port=GRPC_PORT, http_port=HTTP_PORT)
def up(
    options: StackOptions,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            help="Write ports, pids and secrets here as JSON once everything serves.",
            rich_help_panel="Processes",
        ),
    ] = None,
    show_secrets: Annotated[
        bool,
        typer.Option(
            "--show-secrets",
            help="Print how another gateway joins, secrets included.",
            rich_help_panel="Security",
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[address]",
            help="Run the programs as actors of the Ray cluster at this address; without one, of a new one.",
            rich_help_panel="Ray",
        ),
    ] = None,
    ray_targets: Annotated[
        Path | None,
        typer.Option(
            help="Write the addresses of all /metrics here, for Prometheus's file_sd_configs.",
            rich_help_panel="Ray",
        ),
    ] = None,
) -> None:
    """Run everything on this machine: Valkey, a gateway, prefill and decode workers. Ctrl-C stops all.

    Each flag is also a variable (--grpc-port is DIPTYCH_GRPC_PORT) and a key of the --config file, which may
    have sections gateway, prefill, decode and encode. The key of the block hashes is random; DIPTYCH_SECRET
    (hexadecimal) sets it.
    """
    from diptych.cli.foreground import serve  # rich and asyncio where they are needed: --help stays quick

    options = replace(options, secret=os.environ.get("DIPTYCH_SECRET"))
    if ray is not None:
        from diptych.cli.ray_cluster.foreground import serve_on_ray

        raise typer.Exit(
            serve_on_ray(
                options, ray, ready_file=ready_file, targets_file=ray_targets, show_secrets=show_secrets
            )
        )
    if ray_targets is not None:
        raise typer.BadParameter("needs --ray", param_hint="--ray-targets")
    raise typer.Exit(serve(options, ready_file=ready_file, show_secrets=show_secrets))


@app.command(cls=StackCommand, rich_help_panel=_SERVE)
@takes_stack_options(grpc_port=GRPC_PORT, http_port=HTTP_PORT)
def config(
    options: StackOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of YAML.", rich_help_panel="Configuration")
    ] = False,
) -> None:
    """Print the configuration of `diptych up` with these flags, each value with its origin, and its digest.

    The output is a file for --config. /version, GetServerInfo and the log at the start have the same digest.
    """
    from diptych.cli.config_command import print_config

    options = replace(options, secret=os.environ.get("DIPTYCH_SECRET"))
    raise typer.Exit(print_config(options, as_json=as_json))


@app.command(context_settings=_PASS_ON, add_help_option=False, rich_help_panel=_SERVE)
def gateway(context: typer.Context) -> None:
    """Run one gateway alone (gRPC 50051, HTTP 8000). `diptych gateway --help` lists its flags."""
    _become(MODULES["gateway"], context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False, rich_help_panel=_SERVE)
def prefill(context: typer.Context) -> None:
    """Run one prefill worker alone. `diptych prefill --help` lists its flags."""
    _become(MODULES["prefill"], context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False, rich_help_panel=_SERVE)
def decode(context: typer.Context) -> None:
    """Run one decode worker alone. `diptych decode --help` lists its flags."""
    _become(MODULES["decode"], context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False, rich_help_panel=_SERVE)
def encode(context: typer.Context) -> None:
    """Run one encode worker alone, for images. `diptych encode --help` lists its flags."""
    _become(MODULES["encode"], context.args)


@app.command(rich_help_panel=_SERVE)
def rank(
    rendezvous: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Rank 0's --rendezvous.")],
    rank_key_file: Annotated[Path, typer.Option(help="File with the secret that rank 0 has as well.")],
    model: Annotated[str, typer.Option(help="The model of rank 0, as this host has it.")] = "bundled",
    log_level: Annotated[LogLevel, typer.Option(help="Least severe records that are logged.")] = "info",
) -> None:
    """Run a rank of a worker whose rank 0 is on another host, again whenever that worker starts again."""
    from diptych.cli.rank_command import run_ranks

    raise typer.Exit(run_ranks(rendezvous, rank_key_file, model, log_level))


@app.command(context_settings=_PASS_ON, add_help_option=False, rich_help_panel=_CHECK)
def bench(context: typer.Context) -> None:
    """Put load on a running server and measure it. `diptych bench --help` lists its flags."""
    _become("diptych.bench", context.args)


@app.command(rich_help_panel=_USE)
def generate(
    prompt: Annotated[
        str, typer.Argument(callback=utf8, help="What to say to the model; '-' reads standard input.")
    ],
    address: Annotated[
        str, typer.Option(envvar="DIPTYCH_ADDRESS", callback=target, help="host:port of a gateway.")
    ] = f"127.0.0.1:{GRPC_PORT}",
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show where the time went.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    system: Annotated[str | None, typer.Option(callback=utf8, help="System turn of the chat.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(help="Image ahead of the prompt, a file or an http(s) URL; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(callback=utf8, help="Served name; default: the server's first.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=2**32 - 1, help="Longest answer, in tokens.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=-1, max=2**31 - 1)] = None,
    seed: Annotated[
        int | None, typer.Option(min=-(2**63), max=2**63 - 1, help="The same seed gives the same answer.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(callback=utf8, help="Stop string; may be repeated.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Deadline in seconds; inf = none.")] = None,
) -> None:
    """Send one prompt to a running server and print the answer.

    DIPTYCH_API_KEY is the key, if it wants one; DIPTYCH_CA_FILE turns TLS on, and a client's own certificate
    is in DIPTYCH_CLIENT_CERT_FILE and DIPTYCH_CLIENT_KEY_FILE.
    """
    from diptych.cli.generate_command import BadQuestion, Question, ask, read_image, read_prompt

    try:
        text = read_prompt(sys.stdin.buffer) if prompt == "-" else prompt
    except BadQuestion as error:
        raise typer.BadParameter(str(error), param_hint="PROMPT") from None
    try:
        images = tuple(map(read_image, image or ()))
    except BadQuestion as error:
        raise typer.BadParameter(str(error), param_hint="--image") from None
    if image and raw:
        raise typer.BadParameter("images are shown in a chat: not with --raw", param_hint="--image")
    question = Question(
        prompt=text,
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
        images=images,
    )
    raise typer.Exit(ask(address, question, stream=stream, timings=timings))


for operate in (workers, top, drain, role, restart, flush):
    app.command(rich_help_panel=_OPERATE)(operate)
app.add_typer(lora, rich_help_panel=_OPERATE)


@app.command(rich_help_panel=_USE)
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France?",
    model: Annotated[str, typer.Option(help="GGUF file, Hugging Face folder, or 'bundled'.")] = "bundled",
    prefill_workers: Annotated[int, typer.Option(min=1)] = 1,
    decode_workers: Annotated[int, typer.Option(min=1)] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the processes log.")] = False,
) -> None:
    """Start everything on free ports, stream one answer, show where its time went, stop everything."""
    from diptych.cli.demo import run_demo

    options = StackOptions(
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        model=model,
        log_level="info" if verbose else "warning",
    )
    raise typer.Exit(run_demo(prompt, options, verbose=verbose))


@app.command("run-batch", cls=StackCommand, rich_help_panel=_USE)
@takes_stack_options()
def run_batch(
    options: StackOptions,
    source: Annotated[
        Path, typer.Option("--input", "-i", help="Lines of OpenAI's Batch API.", rich_help_panel="Batch")
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File of results; one that is there is completed.", rich_help_panel="Batch"
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(
            help="Root of a running gateway's HTTP port; default: start a system.", rich_help_panel="Batch"
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests at once.", rich_help_panel="Batch", min=1, max=4096)
    ] = 64,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what the processes log.", rich_help_panel="Batch")
    ] = False,
) -> None:
    """Run a file of requests and write one result for each; start a system for it unless --url names one.

    Run it again after an interruption: lines with a result are not sent again.
    """
    from diptych.cli.run_batch import BatchRun
    from diptych.cli.run_batch import run_batch as run

    if not verbose and options.origin("log_level") == "default":
        options = replace(options, log_level="warning")
    options = replace(options, secret=os.environ.get("DIPTYCH_SECRET"))
    raise typer.Exit(run(BatchRun(source, target, url, concurrency), options, verbose=verbose))


@app.command(rich_help_panel=_CHECK)
def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="A GGUF file or a folder: its size, and which backend would compute it."),
    ] = None,
    mmproj: Annotated[
        Path | None,
        typer.Option(help="GGUF file with the encoder of a GGUF model's images; default: found beside it."),
    ] = None,
    speculative_model: Annotated[
        str | None,
        typer.Option(help="A draft model: likewise, and whether its vocabulary is the model's."),
    ] = None,
) -> None:
    """Check that this machine has what Diptych needs. Exit status 1 when something essential is missing."""
    from diptych.cli.doctor import run_doctor

    raise typer.Exit(run_doctor((GRPC_PORT, HTTP_PORT, ADMIN_PORT), model, speculative_model, mmproj))


@app.command(rich_help_panel=_CHECK)
def version() -> None:
    """Print the version."""
    _version(True)


def main() -> None:
    """Entry point of the `diptych` command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a sign for it ends no answer
    sys.argv[1:] = join_lists(sys.argv[1:])
    app()


def _become(module: str, argv: Sequence[str]) -> None:
    """Replace this process by the program: signals and exit status are its own, as in a container."""
    os.execv(sys.executable, [*module_command(module), *argv])
