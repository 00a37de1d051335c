"""`python -m lab.images --model FOLDER`: what prompts of text pay for images beside them, by turns.

Scenes of one system, with an encode worker (`apart`) or without (`inside`), by turns:

1. text alone: prompts at a steady rate; TTFT p50;
2. the same rate of text, and as many prompts with an image, each another one;
3. a stream of text alone: ITL p99;
4. such a stream while hostile image files come one after the other: bombs, cut files, fuzzed headers.

Ratios are taken within a turn: 2 to 1, and 4 to 3. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import grpc
from PIL import Image

from diptych.bench.figures import percentile
from diptych.client import AsyncClient, CallFailed, chat
from diptych.runtime.python_module import module_command
from lab.peers.process import RunningServer
from lab.peers.servers import Server

APART, INSIDE = MODES = ("apart", "inside")
EDGE = 224
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
STREAM_TOKENS = 200
_WORDS = "The quick brown fox jumps over the lazy dog and finds another story to tell. "
Figures = dict[str, float]


def server(mode: str, options: argparse.Namespace, flags: Sequence[str] = ()) -> Server:
    """Describe a system, with more `flags` of `diptych up`."""
    encoders = ("--encode-workers", "1") if mode == APART else ()
    return Server(
        name=mode,
        family="diptych",
        start_timeout_s=300.0,
        precision=options.dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", options.dtype, "--model", options.model, *encoders),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
            *flags,
        ),
    )


def picture(seed: int) -> bytes:
    """Return a PNG file of noise, another one for each seed."""
    noise = random.Random(seed).randbytes(3 * 32 * 32)
    image = Image.frombytes("RGB", (32, 32), noise).resize((EDGE, EDGE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def hostile(seed: int) -> Iterator[bytes]:
    """Yield files without end that no decoder should take, or that take long: each kind in turn.

    What is slow to make is made before the first: a stream that is measured here must not wait for it.
    """
    rng = random.Random(seed)
    image = Image.frombytes("RGB", (EDGE, EDGE), rng.randbytes(3 * EDGE * EDGE))
    whole = []
    for kind in FORMATS:
        file = io.BytesIO()
        image.save(file, kind)
        whole.append(file.getvalue())
    bombs = [bomb(rng.randrange(5_000, 60_000)) for _ in range(8)]
    for number in itertools.count():
        data = bytearray(whole[number % len(FORMATS)])
        if number % 3 == 0:
            yield bytes(data[: rng.randrange(20, len(data))])
        elif number % 3 == 1:
            for _ in range(8):
                data[rng.randrange(min(len(data), 64))] = rng.randrange(256)
            yield bytes(data)
        else:
            yield rng.choice(bombs)


def bomb(edge: int) -> bytes:
    """Return a small PNG file that says it has `edge` squared pixels, all of them black."""
    head = edge.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    body = zlib.compress(bytes(1 + edge // 8) * 2000, 1)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    parts = (
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


async def first_token_s(client: AsyncClient, prompt: object) -> float:
    """Return the seconds until the first token."""
    began = time.perf_counter()
    stream = client.stream(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, timeout_s=120)  # type: ignore[arg-type]
    async with aclosing(stream) as chunks:
        async for _ in chunks:
            return time.perf_counter() - began
    raise RuntimeError("a stream without a token")


async def arrivals(
    client: AsyncClient, prompts: Sequence[object], rate: float, rng: random.Random
) -> list[float]:
    """Ask prompts at a rate a second, whenever those before end; return the seconds until first tokens."""
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(first_token_s(client, prompt)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def gaps_s(client: AsyncClient, seed: int) -> list[float]:
    """Return the seconds between the tokens of a stream."""
    prompt = chat(f"{seed}: {_WORDS * 4}")
    stream = client.stream(prompt, max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=300)
    times = []
    async with aclosing(stream) as chunks:
        async for _ in chunks:
            times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


async def attack(client: AsyncClient, files: Iterator[bytes], refused: list[int]) -> None:
    """Send hostile files one after the other until cancelled; count those that are refused."""
    while True:
        try:
            await client.generate(chat("What is this?", images=[next(files)]), max_tokens=1, timeout_s=60)
        except CallFailed as failed:
            if failed.code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            refused[0] += 1


async def play(address: str, options: argparse.Namespace, seed: int) -> Figures:
    """Return the figures of one system in one turn."""
    rng = random.Random(seed)
    texts = [chat(f"{seed} {n}: {_WORDS * 8}") for n in range(2 * options.prompts)]
    images = [chat(f"{seed} {n}?", images=[picture(1000 * seed + n)]) for n in range(options.prompts)]
    async with AsyncClient(address, retries=0) as client:
        await first_token_s(client, chat("warm up", images=[picture(-seed)]))
        alone = await arrivals(client, texts[: options.prompts], options.rate, rng)
        mixed, pictured = await asyncio.gather(
            arrivals(client, texts[options.prompts :], options.rate, rng),
            arrivals(client, images, options.rate, rng),
        )
        calm = await gaps_s(client, 2 * seed)
        refused, files = [0], hostile(seed)
        next(files)
        attacker = asyncio.create_task(attack(client, files, refused))
        beside = await gaps_s(client, 2 * seed + 1)
        attacker.cancel()
        (ended,) = await asyncio.gather(attacker, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError("hostile files ended otherwise than refused") from ended
    return {
        "text TTFT p50 alone, ms": 1000 * statistics.median(alone),
        "text TTFT p50 beside images, ms": 1000 * statistics.median(mixed),
        "text TTFT p50, beside / alone": statistics.median(mixed) / statistics.median(alone),
        "image TTFT p50, ms": 1000 * statistics.median(pictured),
        "ITL p99 alone, ms": 1000 * percentile(sorted(calm), 99),
        "ITL p99 beside hostile files, ms": 1000 * percentile(sorted(beside), 99),
        "ITL p99, beside / alone": percentile(sorted(beside), 99) / percentile(sorted(calm), 99),
        "hostile files refused": refused[0],
    }


def table(turns: dict[str, list[Figures]]) -> str:
    """Return a table of medians over the turns, with the range of the ratios."""
    modes = [mode for mode in MODES if turns.get(mode)]
    lines = [f"| | {' | '.join(modes)} |", "|---" * (1 + len(modes)) + "|"]
    for name in turns[modes[0]][0]:
        cells = []
        for mode in modes:
            values = [turn[name] for turn in turns[mode]]
            digits = 2 if "/" in name else 1
            spread = f" ({min(values):.2f}–{max(values):.2f})" if "/" in name else ""
            cells.append(f"{statistics.median(values):,.{digits}f}{spread}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the turns and print the table."""
    parser = argparse.ArgumentParser("python -m lab.images", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of a model with images")
    add("--dtype", default="fp32")
    add("--turns", type=int, default=3)
    add("--prompts", type=int, default=40, help="of text, and as many with images, in a scene")
    add("--rate", type=float, default=4.0, help="prompts of a kind a second")
    add("--modes", nargs="*", choices=MODES, default=list(MODES))
    options = parser.parse_args(argv)
    turns: dict[str, list[Figures]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory(prefix="diptych-images-") as folder:
        for turn in range(options.turns):
            for mode in options.modes:
                with RunningServer(server(mode, options), Path(folder)) as running:
                    turns[mode].append(asyncio.run(play(running.address, options, turn + 1)))
                found = {name: round(value, 2) for name, value in turns[mode][-1].items()}
                print(f"turn {turn + 1} of {options.turns}, {mode}: {found}", file=sys.stderr)
    print(f"{options.turns} turns, {options.prompts} prompts of a kind at {options.rate} a second\n")
    print(table(turns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
