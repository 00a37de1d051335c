"""`python -m lab.hostile_images --model FOLDER`: what hostile files and addresses of images do to a system.

1. A stream of text alone, and one while hostile files come by HTTP one after the other: bombs, cut files,
   fuzzed headers of PNG, JPEG, WebP and GIF. By turns, until all files were sent: ITL p99, the slowest
   answer, the most memory that a decoder took, how many decoders there were, and whether a program ended.
2. Remote addresses of images, private ones in many spellings and some that would lead there. A listener on
   this host counts the connections that come of it.

The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from diptych.bench.figures import percentile
from diptych.client import AsyncClient, chat
from lab.images import APART, first_token_s, gaps_s, hostile, picture, server
from lab.peers.process import RunningServer

MODULE = b"diptych.runtime.images.decode"
"""Module of the process that decodes images."""
_MEDIA = {b"\x89P": "png", b"\xff\xd8": "jpeg", b"RI": "webp", b"GI": "gif"}


@dataclass
class Count:
    """Answers to hostile files."""

    statuses: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    sent: int = 0
    decoders: dict[int, int] = field(default_factory=dict)
    """Most bytes of memory of each decoder."""

    def add(self, status: int, seconds: float) -> None:
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.slowest_s = max(self.slowest_s, seconds)


def children(pid: int) -> Iterator[int]:
    """Yield a process' descendants."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = task.read_text().split()
        except OSError:  # it ended meanwhile
            continue
        for child in map(int, found):
            yield child
            yield from children(child)


def decoders(pids: Sequence[int]) -> dict[int, int]:
    """Return the most bytes of memory that each decoder among processes took."""
    found = {}
    for pid in pids:
        try:
            if MODULE in Path(f"/proc/{pid}/cmdline").read_bytes():
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found[pid] = next(1024 * int(one.split()[1]) for one in lines if one.startswith("VmHWM"))
        except (OSError, StopIteration):
            continue
    return found


def ask(root: str, url: str) -> int:
    """Ask about the image at an address; return the status."""
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [{"type": "text", "text": "What is this?"}, image]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{root}/v1/chat/completions", json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def data_url(file: bytes) -> str:
    """Return a file as a data URL, of the type that its beginning says."""
    kind = _MEDIA.get(file[:2], "png")
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def addresses(port: int, count: int) -> Iterator[str]:
    """Yield addresses of private hosts, most of them of this one's `port`, in many spellings."""
    local = [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "0x7f000001",
        "127.1",
        "0",
    ]
    hosts = [*(f"{one}:{port}" for one in local), f"user:pass@127.0.0.1:{port}", f"127.0.0.1.nip.io:{port}"]
    hosts += ["169.254.169.254/latest/meta-data", "10.0.0.1", "192.168.0.1", "172.16.0.1", "[fe80::1]"]
    schemes = ("http://", "https://", "HTTP://", "http:", "//", "ftp://", "gopher://", "file:///", " http://")
    number = 0
    while True:
        for host in hosts:
            for scheme in schemes:
                if number == count:
                    return
                yield f"{scheme}{host}/{number}.png"
                number += 1


def broken(count: int) -> list[bytes]:
    """Return hostile files; one whose damage leaves it an image would be a request like any other."""
    return list(itertools.islice((file for file in hostile(1) if not _is_image(file)), count))


def _is_image(file: bytes) -> bool:
    try:
        with warnings.catch_warnings(action="error"), Image.open(io.BytesIO(file)) as image:
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return False
    return True


async def attack(
    running: RunningServer, files: Iterator[bytes], options: argparse.Namespace, count: Count
) -> None:
    """Send hostile files one after the other until cancelled or all were sent."""
    due = time.perf_counter()
    while count.sent < options.files:
        url = data_url(next(files))
        due += 1 / options.rate if options.rate else 0.0
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        status = await asyncio.to_thread(ask, root_of(running), url)
        count.add(status, time.perf_counter() - began)
        if count.sent % 10 == 0:
            count.decoders |= await asyncio.to_thread(decoders, list(children(running.pid)))


def root_of(running: RunningServer) -> str:
    """Return where a system answers by HTTP."""
    return f"http://127.0.0.1:{running.http_port}"


async def streams(running: RunningServer, options: argparse.Namespace, count: Count) -> list[float]:
    """Return the ratios of ITL p99, stream by stream in turn with and without hostile files."""
    ratios = []
    files = itertools.cycle(broken(options.files))
    async with AsyncClient(running.address, retries=0) as client:
        await first_token_s(client, chat("warm up", images=[picture(-1)]))
        turn = 0
        while count.sent < options.files:
            turn += 1
            calm = await gaps_s(client, 2 * turn)
            attacker = asyncio.create_task(attack(running, files, options, count))
            beside = await gaps_s(client, 2 * turn + 1)
            if turn >= options.turns:
                await attacker  # the rest of the files, without a stream
            attacker.cancel()
            await asyncio.gather(attacker, return_exceptions=True)
            alone_ms, beside_ms = (1000 * percentile(sorted(gaps), 99) for gaps in (calm, beside))
            ratios.append(beside_ms / alone_ms)
            print(f"turn {turn}: {count.sent} files, {alone_ms:.1f} and {beside_ms:.1f} ms", file=sys.stderr)
    return ratios


async def fetched(root: str, count: int) -> tuple[dict[int, int], int]:
    """Return the statuses of requests with remote addresses, and the connections that came of them."""
    connections = 0

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    statuses: dict[int, int] = {}
    async with listener:
        for url in addresses(port, count):
            status = await asyncio.to_thread(ask, root, url)
            statuses[status] = statuses.get(status, 0) + 1
        refused = connections
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # the listener does count
        await asyncio.sleep(0.1)
        writer.close()
        if connections != refused + 1:
            raise RuntimeError("the listener does not count connections")
    return statuses, refused


def main(argv: Sequence[str]) -> int:
    """Run the attacks and print what they did; 1 if a program ended or something was fetched."""
    parser = argparse.ArgumentParser("python -m lab.hostile_images", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of a model with images")
    add("--dtype", default="fp32")
    add("--files", type=int, default=2000)
    add("--rate", type=float, default=50.0, help="files a second; 0: the next one when one is answered")
    add("--turns", type=int, default=12, help="streams of text beside the files, at most")
    add("--urls", type=int, default=200)
    options = parser.parse_args(argv)
    count = Count()
    with (
        tempfile.TemporaryDirectory(prefix="diptych-hostile-") as folder,
        RunningServer(server(APART, options), Path(folder)) as running,
    ):
        before = set(children(running.pid))
        ratios = asyncio.run(streams(running, options, count))
        after = list(children(running.pid))
        statuses, connections = asyncio.run(fetched(root_of(running), options.urls))
        most = max(count.decoders.values(), default=0)
        gone = before - set(after)
    print(
        f"{count.sent} hostile files: {dict(sorted(count.statuses.items()))}, slowest {count.slowest_s:.2f} s"
    )
    made = len(count.decoders)
    print(
        f"most memory of a decoder {most / 2**20:.0f} MiB; decoders {made}; programs that ended: {len(gone)}"
    )
    low, high = min(ratios), max(ratios)
    print(f"ITL p99 beside / alone: {statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})")
    print(f"{options.urls} remote addresses: {dict(sorted(statuses.items()))}, {connections} connections")
    return int(bool(gone) or connections > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
