"""`diptych demo`: start everything, one answer, where its time went, stop everything."""

import asyncio
import sys

from rich.console import Console

from diptych.cli.console import NoteConsole, Progress
from diptych.cli.foreground import StartFailed, report_failure
from diptych.cli.generate_command import timing_table
from diptych.cli.stack_options import StackOptions
from diptych.cli.up import Stopped, run_until_signal, running_stack
from diptych.client import AsyncClient, CallFailed, chat

_MAX_TOKENS = 64
_TIMEOUT_S = 120.0


def run_demo(prompt: str, options: StackOptions, *, verbose: bool) -> int:
    """Exit status 0 when an answer came, 128 and the signal's number when one ended it before."""
    console = NoteConsole()
    progress = Progress(console, lines=verbose)
    try:
        return run_until_signal(_demo(prompt, options, console, progress))
    except Stopped as stopped:
        return stopped.status
    except StartFailed as error:
        progress.close()
        report_failure(console, error, lines=not verbose)
    except (CallFailed, TimeoutError) as error:
        console.out(error, style="red", highlight=False)
    return 1


async def _demo(prompt: str, options: StackOptions, console: Console, progress: Progress) -> int:
    try:
        async with running_stack(options, progress) as stack:
            progress.close()
            async with asyncio.timeout(_TIMEOUT_S), AsyncClient(stack.address) as client:
                await _show_answer(client, prompt, console)
    finally:
        progress.close()
    console.print("[dim]everything is stopped[/]")
    return 0


async def _show_answer(client: AsyncClient, prompt: str, console: Console) -> None:
    console.out(f"\n{prompt}", style="bold", highlight=False)
    async for chunk in client.stream(chat(prompt), max_tokens=_MAX_TOKENS, temperature=0.0):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        if chunk.timings is not None:
            sys.stdout.write("\n\n")
            sys.stdout.flush()
            console.print(timing_table(chunk.timings, chunk.usage))
