"""`python -m lab.hostile_images --model FOLDER`: what hostile files and addresses of images do to a system.

1. A stream of text alone, and one while hostile files come by HTTP one after the other: bombs, cut files,
   fuzzed headers of PNG, JPEG, WebP and GIF. By turns, until all files were sent: ITL p99, the slowest
   answer, the most memory that a decoder took, how many decoders there were, and whether a program ended.
2. Remote addresses of images, private ones in many spellings and some that would lead there. A listener on
   this host counts the connections that come of it. `--allow-image-urls '*'` lets the system fetch images.

With `--tenants N` the files come from N tenants at once, the stream from one more.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from diptych.bench.figures import percentile
from diptych.client import AsyncClient, chat
from gateway.access.key_file import digest_of, fresh_key
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


def write_keys(file: Path, count: int) -> list[str]:
    """Write a file of API keys of `count` tenants; return the keys."""
    keys = [fresh_key() for _ in range(count)]
    file.touch(0o600)
    lines = (
        {"name": f"k{n}", "tenant": f"t{n}", "sha256": digest_of(key).hex(), "scopes": ["inference"]}
        for n, key in enumerate(keys)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return keys


def ask(root: str, url: str, key: str | None = None) -> int:
    """Ask about the image at an address; return the status."""
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [{"type": "text", "text": "What is this?"}, image]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    head = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
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


class Attack:
    """Hostile files, which tenants send one after the other each; without tenants one caller does."""

    def __init__(self, running: RunningServer, options: argparse.Namespace, tenants: Sequence[str]) -> None:
        self._running, self._options = running, options
        self._keys: Sequence[str | None] = tenants or (None,)
        self._files = itertools.cycle(broken(options.files))
        self._threads = ThreadPoolExecutor(len(self._keys) + 1, "attack")
        self.count = Count()

    @property
    def done(self) -> bool:
        """True once all files were sent."""
        return bool(self.count.sent >= self._options.files)

    async def run(self) -> None:
        """Send files until cancelled, or all were sent."""
        await asyncio.gather(*(self._send(key) for key in self._keys))

    async def _send(self, key: str | None) -> None:
        loop, root, rate = asyncio.get_running_loop(), root_of(self._running), self._options.rate
        due = time.perf_counter()
        while not self.done:
            url = data_url(next(self._files))
            due += len(self._keys) / rate if rate else 0.0
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            status = await loop.run_in_executor(self._threads, ask, root, url, key)
            self.count.add(status, time.perf_counter() - began)
            if self.count.sent % 10 == 0:
                pids = list(children(self._running.pid))
                self.count.decoders |= await loop.run_in_executor(self._threads, decoders, pids)


def root_of(running: RunningServer) -> str:
    """Return where a system answers by HTTP."""
    return f"http://127.0.0.1:{running.http_port}"


async def streams(address: str, attack: Attack, turns: int, key: str | None) -> list[float]:
    """Return the ratios of ITL p99, stream by stream in turn with and without hostile files.

    Files that are left after so many turns come without a stream.
    """
    ratios = []
    async with AsyncClient(address, retries=0, api_key=key) as client:
        await first_token_s(client, chat("warm up", images=[picture(-1)]))
        turn = 0
        while not attack.done:
            turn += 1
            calm = await gaps_s(client, 2 * turn)
            attacker = asyncio.create_task(attack.run())
            beside = await gaps_s(client, 2 * turn + 1)
            if turn >= turns:
                await attacker
            attacker.cancel()
            await asyncio.gather(attacker, return_exceptions=True)
            alone_ms, beside_ms = (1000 * percentile(sorted(gaps), 99) for gaps in (calm, beside))
            ratios.append(beside_ms / alone_ms)
            print(
                f"turn {turn}: {attack.count.sent} files, {alone_ms:.1f} and {beside_ms:.1f} ms",
                file=sys.stderr,
            )
    return ratios


async def fetched(root: str, count: int, key: str | None) -> tuple[dict[int, int], int]:
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
            status = await asyncio.to_thread(ask, root, url, key)
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
    add("--tenants", type=int, default=0, help="that send the files at once; 0: there are no keys")
    add("--allow-image-urls", default="", help="hosts whose images the gateway fetches")
    options = parser.parse_args(argv)
    flags = ["--set", f"gateway.allow-image-urls={options.allow_image_urls}"]
    with tempfile.TemporaryDirectory(prefix="diptych-hostile-") as folder:
        keys: list[str | None] = [None]
        if options.tenants:
            file = Path(folder) / "keys.jsonl"
            keys = [*write_keys(file, options.tenants + 1)]
            flags += ["--api-keys-file", str(file)]
        with RunningServer(server(APART, options, flags), Path(folder)) as running:
            attack = Attack(running, options, [key for key in keys[1:] if key])
            before = set(children(running.pid))
            ratios = asyncio.run(streams(running.address, attack, options.turns, keys[0]))
            after = list(children(running.pid))
            statuses, connections = asyncio.run(fetched(root_of(running), options.urls, keys[0]))
    count = attack.count
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
