"""`diptych bench`: from flags to a table, a file and a picture."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.bench import combinations, outputs, plot
from diptych.bench import options as flags
from diptych.bench.backends import Backend, Unreachable
from diptych.bench.backends.choose import choose_backend
from diptych.bench.campaign import LoadResult, Plan, run_campaign
from diptych.bench.datasets import BadDataset, Dataset
from diptych.bench.datasets.choose import choose_dataset
from diptych.bench.load import Load
from diptych.bench.request import BenchRequest, RequestFailed
from diptych.bench.result_file import RunDescription

_SAMPLE_TOKENS = 32
# The bar is drawn by a thread of this process: often enough to be watched, seldom enough not to be measured.
_DRAWS_PER_SECOND = 2


def main(argv: Sequence[str]) -> int:
    """Run a benchmark.

    Exit status: 0, 1 when the server cannot be measured, a request fails, an answer is wrong or a result
    cannot be written, 2 for wrong flags, 130 when interrupted.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a sign for it costs no table
    parser = flags.parser()
    options = parser.parse_args(argv)
    if options.plot is not None and not plot.can_plot():
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        combinations.check(options)  # before anything is read or asked
        flags.plan(options)
        outputs.check(options)
        dataset = choose_dataset(flags.dataset_name(options), options)
        _raise_descriptor_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(options, dataset))
    except (flags.BadOptions, BadDataset, outputs.BadPath) as error:
        parser.error(str(error))
    except (Unreachable, RequestFailed) as error:
        print(f"diptych bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _bench(options: argparse.Namespace, dataset: Dataset) -> int:
    backend, plan = choose_backend(options), flags.plan(options)
    results = plan.results(dataset)
    try:
        model = await backend.model()
        if not await _text_is_right(backend, options):
            return 1
        arguments = {name: value for name, value in vars(options).items() if name != "api_key"}
        tokenizer = None if options.tokenizer is None else str(options.tokenizer)
        described = RunDescription(
            backend.name, model, tokenizer, dataset.name, options.label, options.seed, arguments
        )
        try:
            await _measure(backend, options, dataset, plan, results)
        except asyncio.CancelledError:  # Ctrl-C: what is complete took its time, too
            _tell_complete(options, plan, results, described)
            raise
    finally:
        await backend.close()
    written = outputs.tell(options, results, described)
    return 0 if written and all(_all_answered(result) for result in results) else 1


def _all_answered(result: LoadResult) -> bool:
    figures = result.figures()
    return bool(figures["completed"]) and not figures["failed"]


def _tell_complete(
    options: argparse.Namespace, plan: Plan, results: Sequence[LoadResult], described: RunDescription
) -> None:
    complete = [one for one in results if one.rounds]
    if complete:
        outputs.tell(options, complete, described)
    count = sum(len(one.rounds) for one in results)
    print(
        f"diptych bench: interrupted: {count} of {plan.rounds * len(results)} runs are complete",
        file=sys.stderr,
    )


async def _text_is_right(backend: Backend, options: argparse.Namespace) -> bool:
    """Print one answer and return whether it has the expected text: a fast wrong answer is a failure."""
    if options.check_text is None and options.expect is None:
        return True
    reply = await backend.send(BenchRequest(options.check_text or flags.CHECK_TEXT, _SAMPLE_TOKENS))
    # The model's words are text, not markup of a terminal.
    Console().print(reply.text, markup=False, highlight=False, soft_wrap=True)
    if options.expect is not None and options.expect not in reply.text:
        print(f"diptych bench: the answer does not contain {options.expect!r}", file=sys.stderr)
        return False
    return True


async def _measure(
    backend: Backend, options: argparse.Namespace, dataset: Dataset, plan: Plan, results: Sequence[LoadResult]
) -> None:
    total = plan.rounds * sum(one.num_prompts for one in results)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=console,
        refresh_per_second=_DRAWS_PER_SECOND,
        transient=True,
        disable=options.no_progress or not console.is_terminal,
    ) as progress:
        task = progress.add_task("warm-up", total=total)

        def started(round_number: int, load: Load) -> None:
            progress.update(task, description=f"round {round_number + 1}/{plan.rounds}, {load.label}")

        await run_campaign(backend, dataset, plan, results, started, lambda: progress.advance(task))


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets us have.

    Logins begin with 1,024. Over HTTP each request in flight has a connection of its own: beyond that many
    would fail here, and look like failures of the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
