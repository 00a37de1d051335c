"""`diptych generate`: send one prompt to a running server."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from grpc import StatusCode
from rich.console import Console
from rich.table import Table

from diptych.cli.retry import call_with_retries
from diptych.client import CallFailed, Chunk, Client, Completion, ImageUrl, Prompt, Timings, Usage, chat
from diptych.client.credentials import Access
from gateway.ports import GRPC_PORT, admin_port_beside

Say = Callable[[str], None]


class BadQuestion(ValueError):
    """Prompt that cannot be sent."""


def read_prompt(source: BinaryIO) -> str:
    """Read the whole prompt. Raises BadQuestion for what is not UTF-8, in which gRPC sends text."""
    try:
        return source.read().decode()
    except UnicodeDecodeError as error:
        raise BadQuestion(f"standard input is not UTF-8: byte {error.start} is {error.reason}") from None


def read_image(place: str) -> bytes | ImageUrl:
    """Return the file at a path, or the URL that it is. Raises BadQuestion for a file that cannot be read."""
    if place.startswith(("http://", "https://")):
        return ImageUrl(place)
    try:
        return Path(place).read_bytes()
    except OSError as error:
        raise BadQuestion(f"{place}: {error.strerror}") from None


@dataclass(frozen=True)
class Question:
    """A prompt and how to answer it; `options` are those of the client that were given."""

    prompt: str
    raw: bool
    system: str | None
    model: str | None
    timeout_s: float | None
    options: dict[str, Any]
    images: tuple[bytes | ImageUrl, ...] = ()

    def as_prompt(self) -> Prompt:
        return self.prompt if self.raw else chat(self.prompt, images=self.images, system=self.system)


def ask(address: str, question: Question, *, stream: bool, timings: bool) -> int:
    """Print the answer to stdout, all else to stderr. Exit status 1 when the call fails."""
    notes = Console(stderr=True)
    try:
        access = Access.from_environment()
    except OSError as error:
        notes.out(f"DIPTYCH_CA_FILE and its like: {error}", style="red", highlight=False)
        return 1
    except ValueError as error:
        notes.out(f"DIPTYCH_API_KEY: {error}", style="red", highlight=False)
        return 1

    def say(line: str) -> None:
        notes.out(f"{address}: {line}", style="yellow", highlight=False)

    try:
        with Client(
            address, model=question.model, api_key=access.api_key, credentials=access.credentials, retries=0
        ) as client:
            answer = _streamed if stream else _whole
            spent, usage = answer(client, question, say)
    except CallFailed as failure:
        notes.out(f"{address}: {failure}{hint_for(failure)}", style="red", highlight=False)
        for path, problem in failure.violations.items():
            if problem not in failure.message or path not in failure.message:
                notes.out(f"  {path}: {problem}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    if timings and spent is not None:
        notes.print(timing_table(spent, usage))
    return 0


def hint_for(failure: CallFailed) -> str:
    """Return what may help after a failure that the server did not explain; "" for others."""
    if failure.code is StatusCode.UNIMPLEMENTED:
        return (
            f"; is it an admin port? A gateway's own port is {GRPC_PORT} by default, its admin port "
            f"{admin_port_beside(GRPC_PORT, None)}"
        )
    if failure.code is StatusCode.UNAVAILABLE and not failure.reason:
        if "refused" in failure.message:
            return "; does a server run there? `diptych up` starts one, --address names another"
        return "; does it speak gRPC there, and does it want TLS? DIPTYCH_CA_FILE turns TLS on"
    return ""


def _whole(client: Client, question: Question, say: Say) -> tuple[Timings | None, Usage | None]:
    def call(left_s: float | None) -> Completion:
        return client.generate(question.as_prompt(), timeout_s=left_s, **question.options)

    answer = call_with_retries(call, question.timeout_s, say)
    if answer.reasoning_content:
        _show_reasoning(f"{answer.reasoning_content}\n")
    print(answer.text)
    return answer.timings, answer.usage


def _streamed(client: Client, question: Question, say: Say) -> tuple[Timings | None, Usage | None]:
    def begin(left_s: float | None) -> Iterator[Chunk]:
        stream = client.stream(question.as_prompt(), timeout_s=left_s, **question.options)
        return chain(list(islice(stream, 1)), stream)  # what comes later is not repeated

    spent: Timings | None = None
    usage: Usage | None = None
    begun = reasons = False
    try:
        for chunk in call_with_retries(begin, question.timeout_s, say):
            if chunk.reasoning_content:
                _show_reasoning(chunk.reasoning_content)
            elif reasons and chunk.text:
                _show_reasoning("\n")
            reasons = bool(chunk.reasoning_content) or (reasons and not chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            begun = True
            spent, usage = chunk.timings or spent, chunk.usage or usage
    finally:
        if begun:
            print(flush=True)  # what went wrong does not stick to the answer
    return spent, usage


def _show_reasoning(text: str) -> None:
    """Print reasoning to stderr: stdout has the answer alone."""
    Console(stderr=True).out(text, style="dim", highlight=False, end="")


def timing_table(spent: Timings, usage: Usage | None) -> Table:
    """Return a table of a request's phases in milliseconds."""
    table = Table(title="Where the time went", title_justify="left")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("")
    cached = f"{usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens cached" if usage else ""
    moved = f"{spent.kv_bytes_transferred:,} bytes moved"
    rows = [
        ("queue", spent.queue, ""),
        *([("images", spent.encode, "their encoding")] if spent.encode else []),
        ("prefill", spent.prefill, cached),
        ("handoff", spent.kv_transfer, moved),
        ("decode queue", spent.decode_queue, ""),
        ("decode", spent.decode, _pace(spent, usage)),
    ]
    if spent.retries:
        lost = spent.total - sum(seconds for _, seconds, _ in rows)
        rows.append(("retries", max(lost, 0.0), f"{spent.retries}: attempts that were lost, and waiting"))
    for phase, seconds, note in rows:
        table.add_row(phase, f"{seconds * 1e3:.2f}", note)
    table.add_section()
    table.add_row("first token after", f"{spent.time_to_first_token * 1e3:.2f}", "")
    table.add_row("total", f"{spent.total * 1e3:.2f}", "")
    return table


def _pace(spent: Timings, usage: Usage | None) -> str:
    # A decode phase is the last attempt's alone; tokens of the attempts before it are no less tokens.
    seconds = spent.total - spent.time_to_first_token if spent.retries else spent.decode
    if usage is None or usage.completion_tokens < 2 or seconds <= 0:
        return ""
    # The first token is the prefill worker's.
    return f"{(usage.completion_tokens - 1) / seconds:.1f} tokens/s"
