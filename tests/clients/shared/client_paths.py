"""Paths that each client is led along, and the report of them: what the drivers share.

A driver runs with the interpreter of its client's environment, so this imports the standard library only.
Each path is a function of a `Server` that returns a remark or None, and raises where the client did not do
what it should.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import sys
import time
import traceback
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

QUESTION = "What is the capital of France?"
FOLLOW_UP = "And of Italy?"
STORY = "Write a very long story about a lighthouse keeper, with many chapters."
LONG_PROMPT = "word " * 12_000  # more tokens than the model's context has
IMAGE_QUESTION = "What is this?"
MIN_IMAGE_TOKENS = 40  # more than the question has: the tokens of the image are counted
MAX_TOKENS = 48
ENDLESS_TOKENS = 4000
IDLE_TIMEOUT_S = 20.0
OVERFLOW_CODE = "context_length_exceeded"
REMARK_LENGTH = 300


@dataclass(frozen=True)
class Server:
    """A system that is asked: its root URL, the name of its model and its gRPC address."""

    root: str
    model: str
    grpc_address: str

    @property
    def url(self) -> str:
        """The base URL of OpenAI's API."""
        return f"{self.root}/v1"


class NotOfferedError(Exception):
    """The client has no such path; the message says why."""


Path = Callable[[Server], str | None]


def report(paths: dict[str, Path]) -> None:
    """Run `paths` one after another and print a JSON line for each: `path`, `result` and `remark`.

    The path "tools" runs twice: with the model as it is, and with one whose chat template has tools. "images"
    asks a tiny model that reads images; drivers may be without it.
    """
    bundled = Server(
        os.environ["CLIENT_ROOT"], os.environ["CLIENT_MODEL"], os.environ.get("CLIENT_GRPC_ADDRESS", "")
    )
    tools = Server(os.environ["CLIENT_TOOLS_ROOT"], bundled.model, "")
    images = Server(os.environ["CLIENT_IMAGES_ROOT"], bundled.model, "")
    for name, path in {"images": _not_driven, **paths}.items():
        _run(name, path, images if name == "images" else bundled)
        if name == "tools":
            _run("tools (template)", path, tools)


def _not_driven(server: Server) -> None:
    raise NotOfferedError("its images are not driven")


def _run(name: str, path: Path, server: Server) -> None:
    try:
        remark, result = path(server) or "", "ok"
    except NotOfferedError as error:
        remark, result = str(error), "not offered"
    except Exception as error:
        traceback.print_exc()
        refused = is_refusal(error) and not isinstance(error, AssertionError)
        remark, result = describe(error), "refused" if refused else "failed"
    remark = " ".join(remark.split())[:REMARK_LENGTH]
    print(json.dumps({"path": name, "result": result, "remark": remark}), flush=True)
    sys.stderr.flush()


def png(seed: int) -> bytes:
    """Return a PNG file of 40 x 30 pixels, another one for each seed."""
    lines = (b"\0" + bytes((x * y * seed) % 256 for x in range(3 * 40)) for y in range(1, 31))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 40, 30, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(lines))),
        (b"IEND", b""),
    )
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def png_base64(seed: int) -> str:
    """Return the file of `png` in base64."""
    return base64.b64encode(png(seed)).decode()


def png_url(seed: int) -> str:
    """Return the file of `png` as a data URL."""
    return "data:image/png;base64," + png_base64(seed)


def check_images(answers: dict[int, list[tuple[str, int]]]) -> None:
    """Check texts and prompt tokens of answers about images, by seed, each asked in several forms.

    The forms must agree, and the images differ.
    """
    for seed, found in answers.items():
        check(len(set(found)) == 1, f"the answers about one image differ: {found}")
        check(found[0][0] and found[0][1] > MIN_IMAGE_TOKENS, f"image {seed} is not counted: {found}")
    check(len({found[0][0] for found in answers.values()}) == len(answers), f"another image: {answers}")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all that led to it."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def is_refusal(error: BaseException) -> bool:
    """Return True if the server answered with a status of 4xx, wrapped by the client or not."""
    return any(400 <= (status_of(one) or 0) < 500 for one in causes(error))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception carries."""
    for holder in (error, getattr(error, "response", None)):
        status = getattr(holder, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def body_of(error: BaseException) -> str:
    """Return the text of the response that an exception carries, or nothing."""
    text = getattr(getattr(error, "response", None), "text", "")
    return text if isinstance(text, str) else ""


def describe(error: BaseException) -> str:
    """Return the type and message of what the server said, or else of `error` itself."""
    refusals = [one for one in causes(error) if 400 <= (status_of(one) or 0) < 500]
    told = refusals[0] if refusals and not isinstance(error, AssertionError) else error
    found = re.search(r"'message': (['\"])(.*?)\1, '", str(told))
    text = found.group(2) if found else str(told)
    return f"{type(error).__name__}: {text}"


def check(condition: object, remark: object) -> None:
    """Raise AssertionError with `remark` unless `condition` holds."""
    if not condition:
        raise AssertionError(str(remark))


def expect_overflow(call: Callable[[], object], *types: type[BaseException]) -> str:
    """Check that `call` raises one of `types` for a prompt beyond the context; returns the type's name.

    The exception says so by its own type, or by OpenAI's code or sentence.
    """
    try:
        call()
    except types as error:
        told = " ".join(f"{getattr(one, 'code', '')} {one} {body_of(one)}" for one in causes(error))
        found = OVERFLOW_CODE in told or "maximum context length" in told or "Context" in type(error).__name__
        check(found, f"not known as an overflow: {told}")
        return type(error).__name__
    except Exception as error:
        raise AssertionError(f"not known as an overflow: {describe(error)}") from error
    raise AssertionError("a prompt beyond the context was answered")


def running_requests(server: Server) -> float:
    """Return the number of requests that the gateway has, running or waiting."""
    with urllib.request.urlopen(f"{server.root}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
    )


def expect_idle(server: Server) -> None:
    """Check that the gateway has no request any more within IDLE_TIMEOUT_S: a cancelled one was ended."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while busy := running_requests(server):
        check(
            time.monotonic() < deadline, f"{busy:.0f} request still runs {IDLE_TIMEOUT_S} s after the cancel"
        )
        time.sleep(0.2)


def expect_no_refusal(steps: list) -> None:
    """Raise the first error among an agent's steps that the server caused; the model's own are let be."""
    for error in (getattr(step, "error", None) for step in steps):
        if error is not None and is_refusal(error):
            raise error
