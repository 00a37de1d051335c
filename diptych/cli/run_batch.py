"""`diptych run-batch`: send the lines of a file to a system, and write one result for each.

Lines and results have the form of OpenAI's Batch API. A run that is cut goes on where it was: lines whose
result is in the output already are not sent again.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from diptych.cli.console import NoteConsole, Progress
from diptych.cli.foreground import StartFailed, report_failure
from diptych.cli.stack_options import StackOptions
from diptych.cli.up import Stopped, run_until_signal, running_stack
from gateway.frontends.batches.lines import (
    BadLine,
    BatchLine,
    answered,
    not_run,
    read_line,
    whole_results,
)
from gateway.frontends.openai.endpoints import GENERATING

_RETRIED = frozenset({429, 502, 503})
_RETRY_S = (0.5, 15.0)
_TIMEOUT_S = 24 * 3600.0
_REPORT_S = 5.0


@dataclass(frozen=True)
class BatchRun:
    """Files of a run, and where it goes.

    `url` is the root of a running gateway's HTTP port; None starts a system.
    """

    source: Path
    target: Path
    url: str | None
    concurrency: int


class BadInput(ValueError):
    """Input that cannot be run; the text is for people."""


def run_batch(run: BatchRun, options: StackOptions, *, verbose: bool) -> int:
    """Return exit status 0 once every line has a result, whatever it is; 1 if something else went wrong."""
    console = NoteConsole()
    progress = Progress(console, lines=verbose)
    try:
        lines = read_lines(run.source)
        return run_until_signal(_run(run, lines, options, progress))
    except Stopped as stopped:
        return stopped.status
    except StartFailed as error:
        progress.close()
        report_failure(console, error, lines=not verbose)
    except (BadInput, OSError, aiohttp.ClientError) as error:
        print(f"diptych run-batch: {error}", file=sys.stderr)
    return 1


def read_lines(source: Path) -> list[BatchLine]:
    """Return the requests of a file. Raises BadInput with the first bad line."""
    lines, ids = list[BatchLine](), set[str]()
    try:
        for number, data in enumerate(source.read_bytes().splitlines(), 1):
            if data.strip():
                line = read_line(number, data, GENERATING)
                if line.custom_id in ids:
                    raise BadLine(number, "custom_id", "is that of an earlier line")
                ids.add(line.custom_id)
                lines.append(line)
    except BadLine as fault:
        raise BadInput(f"{source}:{fault.number}: {fault.param or 'the line'} {fault}") from None
    return lines


async def _run(run: BatchRun, lines: list[BatchLine], options: StackOptions, progress: Progress) -> int:
    with run.target.open("a+b", buffering=0) as target:
        done = results_of(target)
        left = [line for line in lines if line.custom_id not in done]
        if done:
            print(f"{len(done)} results are there already; {len(left)} lines are left", file=sys.stderr)
        if left:
            async with _root(run, options, progress) as root:
                progress.close()
                await _Sender(root, target, run.concurrency).send(left)
    return 0


def results_of(target: IO[bytes]) -> Collection[str]:
    """Return the ids of the results in an output; what was cut is removed from its end. Raises BadInput."""
    target.seek(0)
    try:
        found, size = whole_results(target)
    except ValueError:
        raise BadInput(f"{target.name} is there, and has no results of a batch") from None
    target.truncate(size)
    return found


@asynccontextmanager
async def _root(run: BatchRun, options: StackOptions, progress: Progress) -> AsyncIterator[str]:
    """Yield the root URL of the gateway; a system of our own runs meanwhile where there is none."""
    if run.url is not None:
        yield run.url.rstrip("/")
        return
    async with running_stack(options, progress) as stack:
        yield f"http://{stack.host}:{stack.http_port}"


class _Sender:
    """Sender of lines, `concurrency` at once, each until it is answered."""

    def __init__(self, root: str, target: IO[bytes], concurrency: int) -> None:
        self._root = root
        self._target = target
        self._concurrency = concurrency
        self._succeeded = self._failed = 0

    async def send(self, lines: list[BatchLine]) -> None:
        """Send all lines and write their results. Raises ClientError when there is no gateway."""
        key = os.environ.get("DIPTYCH_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        waiting = iter(lines)
        async with aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        ) as session:

            async def worker() -> None:
                for line in waiting:
                    await self._one(session, line)

            reporting = asyncio.create_task(self._report(len(lines)))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._concurrency, len(lines))):
                        group.create_task(worker())
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            finally:
                reporting.cancel()
        self._tell(len(lines))

    async def _report(self, total: int) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._tell(total)

    def _tell(self, total: int) -> None:
        done = self._succeeded + self._failed
        print(f"{done} of {total} lines, {self._failed} failed", file=sys.stderr, flush=True)

    async def _one(self, session: aiohttp.ClientSession, line: BatchLine) -> None:
        if line.body.get("stream"):
            why = "stream must be false: a batch has whole answers"
            self._write(not_run(line, "invalid_line", why), False)
            return
        wait_s, connections = _RETRY_S[0], 0
        while True:
            try:
                async with session.post(self._root + line.url, json=line.body) as answer:
                    text, status, headers = await answer.text(), answer.status, answer.headers
            except aiohttp.ClientConnectionError:
                connections += 1
                if connections > 20:  # about five minutes: a gateway that restarts is back by then
                    raise
                status, headers = 503, CIMultiDictProxy(CIMultiDict())
            if status not in _RETRIED:
                break
            wait_s = min(max(float(headers.get("Retry-After", 0)), wait_s * 1.5), _RETRY_S[1])
            await asyncio.sleep(wait_s)
        result = answered(line, status, headers.get("x-request-id", ""), _one_line(text))
        self._write(result, status == 200)

    def _write(self, result: bytes, succeeded: bool) -> None:
        if self._target.write(result) != len(result):
            raise OSError("a result was cut: the disk is full")
        self._succeeded += succeeded
        self._failed += not succeeded


def _one_line(text: str) -> str:
    """Return JSON without line breaks; what a proxy says in other forms becomes a string."""
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        return json.dumps(text)
