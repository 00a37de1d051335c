"""Foreground of `diptych up`: start, print where it serves, wait for the end."""

import asyncio
from functools import partial
from pathlib import Path

from rich.console import Console

from diptych.cli.child import ChildFailed
from diptych.cli.console import NoteConsole, Progress
from diptych.cli.control import control_socket
from diptych.cli.preflight import BadOptions
from diptych.cli.rolling_restart import rolling_restart
from diptych.cli.stack_options import StackOptions
from diptych.cli.up import Stack, Stopped, run_until_signal, running_stack
from diptych.cli.valkey import ValkeyMissing

StartFailed = (BadOptions, ChildFailed, ValkeyMissing)


def serve(options: StackOptions, *, ready_file: Path | None, show_secrets: bool) -> int:
    """Run until a signal comes. Exit status 1 when something did not start."""
    console = NoteConsole()
    progress = Progress(console, lines=True)
    try:
        return run_until_signal(_serve(options, console, progress, ready_file, show_secrets))
    except Stopped:
        return 0
    except StartFailed as error:
        progress.close()
        report_failure(console, error, lines=False)  # they were shown as they came
        return 1


async def _serve(
    options: StackOptions, console: Console, progress: Progress, ready_file: Path | None, show_secrets: bool
) -> int:
    try:
        async with running_stack(options, progress, ready_file=ready_file) as stack:
            print_addresses(console, options, stack, show_secrets)
            warn = partial(console.print, style="yellow", highlight=False, soft_wrap=True)
            models = stack.models
            others = {} if models is None else {"load_model": models.load, "keep_models": models.keep}
            async with control_socket(stack.grpc_port, partial(rolling_restart, stack), warn, others):
                await asyncio.Event().wait()  # until cancelled
            return 0
    finally:
        progress.close()


def report_failure(console: Console, error: Exception, *, lines: bool) -> None:
    """Print what did not start, and with `lines` its last lines."""
    console.out(error, style="red", highlight=False)
    if lines and isinstance(error, ChildFailed):
        for line in error.last_lines:
            console.out(f"  {line}", highlight=False)


def first_question(options: StackOptions, address: str) -> str:
    """Return a command that asks this system, with the variables that it wants; `…` is for the user to fill
    in.
    """
    wanted = {
        "DIPTYCH_CA_FILE": options.tls_cert is not None,
        "DIPTYCH_CLIENT_CERT_FILE": options.tls_client_ca is not None,
        "DIPTYCH_CLIENT_KEY_FILE": options.tls_client_ca is not None,
        "DIPTYCH_API_KEY": options.api_keys_file is not None,
    }
    variables = "".join(f"{name}=… " for name, is_wanted in wanted.items() if is_wanted)
    return (
        f'{variables}diptych generate "What is the capital of France?" --stream --timings --address {address}'
    )


def print_addresses(console: Console, options: StackOptions, stack: Stack, show_secrets: bool) -> None:
    """Print where a system serves, and how it is asked."""

    def say(markup: str) -> None:
        console.print(markup, highlight=False, soft_wrap=True)

    say(
        f"[bold green]Diptych serves[/]  gRPC {stack.address}   OpenAI API {stack.http_url}/v1   "
        f"metrics {stack.http_url}/metrics   admin {stack.host}:{stack.admin_port}   "
        f"configuration {stack.config_digest}"
    )
    say(f"  {first_question(options, stack.address)}")
    if show_secrets:
        say("  another gateway joins with:")
        for name, value in stack.shared.of_gateways.items():
            say(f"    export {name}={value}")
        tls = "" if stack.certificates is None else f" --internal-tls {stack.certificates}"
        say(f"    diptych gateway --grpc-port 0 --http-port 0{tls}")
    say("  Ctrl-C stops everything")
