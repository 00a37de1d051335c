"""`python -m lab.groups`: what a worker of several ranks costs beside one process, on the same cores.

    one     one process with all threads
    parts   the same, which adds in the parts of the group
    ranks   a group of as many ranks as there are threads, one thread each

Bare engines without a service, loaded by the workers' own loader, take turns round by round: a prompt in
steps of 512 tokens, then streams that decode greedily with steps launched ahead. Ratios are those within a
round; figures are medians. With them, each process' bytes of weights and of memory that is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from decode_worker.config import DecodeSettings
from diptych.engine.batch import Launched, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.runtime.python_module import module_command
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.loaded_engine import LoadedEngine
from lab.interference.neighbours import Ticks

CHUNK, VOCABULARY = 512, 40_000
"""Tokens of a prompt's step; ids below which prompts are drawn."""
_GREEDY = SampleRow(SamplingParams(temperature=0.0), (), ())
Figures = dict[str, float]


def flags_of(arm: str, ranks: int) -> tuple[str, ...]:
    """Return a worker's flags by which it is one process, one in parts, or a group."""
    threads = ("--threads", str(ranks))
    return {
        "one": threads,
        "parts": (*threads, "--sum-parts", str(ranks)),
        "ranks": (*threads, "--tensor-parallel", str(ranks)),
    }[arm]


class Engine:
    """An engine in which one thing at a time is measured."""

    def __init__(self, engine: LoadedEngine, tokens: int) -> None:
        """Serve sequences of up to `tokens` tokens."""
        self._runner: Runner = engine.runner
        self._blocks = engine.layout.blocks_for(tokens)
        self._memory: KVMemory = engine.model.kv_memory(engine.layout, 16 * self._blocks)
        self._random = random.Random(7)

    def _table(self, stream: int) -> range:
        return range(stream * self._blocks, (stream + 1) * self._blocks)

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds until a prompt's first token."""
        ids = [self._random.randrange(1000, VOCABULARY) for _ in range(tokens)]
        began = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            last = start + CHUNK >= tokens
            step = SequenceStep(self._memory, self._table(0), start, ids[start : start + CHUNK], last)
            self._runner.step_and_sample([step], [_GREEDY] * last)
        return time.perf_counter() - began

    def tokens_per_s(self, streams: int, context: int, steps: int) -> float:
        """Return the tokens a second of streams behind `context` tokens each, whatever lies there."""

        def launch(at: int) -> Launched:
            rows = [
                SequenceStep(
                    self._memory, self._table(n), context + at, [1000], True, follows=n if at else None
                )
                for n in range(streams)
            ]
            launched = self._runner.launch(rows, [_GREEDY] * streams)
            assert launched is not None, "greedy rows are launched"
            return launched

        began, ahead = time.perf_counter(), launch(0)
        for at in range(1, steps):
            current, ahead = ahead, launch(at)
            current.collect()
        ahead.collect()
        return streams * steps / (time.perf_counter() - began)


def private_bytes(pid: int) -> int:
    """Return the bytes of a process that no other has, from smaps_rollup (proc(5))."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        fields = (line.split() for line in lines if line.startswith("Private_"))
        return 1024 * sum(int(kib) for _, kib, _ in fields)


async def serve(flags: Sequence[str], tokens: int) -> None:
    """Load an engine and answer the questions of standard input, a JSON object a line."""
    settings = DecodeSettings.read_argv((*flags, "--no-share-weights"))
    loaded = await load_engine(settings)
    engine, group = Engine(loaded, tokens), loaded.group

    def about(_: Mapping[str, Any]) -> Any:
        pids = [os.getpid(), *(() if group is None else group.pids)]
        return {
            "computes": f"{loaded.model.backend_name}, {loaded.dtype}",
            "weights": [] if group is None else list(group.weight_bytes),
            "private": [private_bytes(pid) for pid in pids],
        }

    answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "about": about,
        "prompt_s": lambda asked: engine.prompt_s(asked["tokens"]),
        "tokens_per_s": lambda asked: engine.tokens_per_s(asked["streams"], asked["context"], asked["steps"]),
    }

    def answer() -> None:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(answers[asked["ask"]](asked)), flush=True)

    await asyncio.to_thread(answer)


class Arm:
    """A running engine, asked over pipes."""

    def __init__(self, flags: Sequence[str], tokens: int) -> None:
        command = [*module_command("lab.groups"), "--serve", str(tokens), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, ask: str, **given: int) -> Any:
        """Return the answer to a question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ask": ask, **given}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the engine."""
        self.process.kill()
        self.process.wait()


def table(rounds: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    """Yield lines of a table: medians by arm, and the medians of the ratios within a round to `one`."""
    arms = list(rounds)
    yield "| | " + " | ".join(arms) + " | " + " | ".join(f"{arm} / one" for arm in arms[1:]) + " |"
    yield "|---" * (2 * len(arms)) + "|"
    for name in rounds["one"][0]:
        cells = [f"{statistics.median(one[name] for one in rounds[arm]):.3g}" for arm in arms]
        for arm in arms[1:]:
            pairs = zip(rounds[arm], rounds["one"], strict=True)
            cells.append(f"{statistics.median(found[name] / one[name] for found, one in pairs):.2f}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def measure(arm: Arm, prompt: int, streams: Sequence[int], steps: int) -> Figures:
    """Return the figures of one round of one engine."""
    found = {f"prompt of {prompt} tokens, ms": 1000 * arm.ask("prompt_s", tokens=prompt)}
    for count in streams:
        name = f"{count} streams, tokens/s" if count > 1 else "1 stream, tokens/s"
        found[name] = arm.ask("tokens_per_s", streams=count, context=prompt, steps=steps)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds and print the table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--serve"]:
        asyncio.run(serve(arguments[2:], int(arguments[1])))
        return 0
    parser = argparse.ArgumentParser(prog="python -m lab.groups", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--arms", nargs="*", default=["parts", "ranks"], choices=("parts", "ranks"))
    parser.add_argument("flags", nargs="*", help="of every worker, behind --: --model, --dtype, …")
    options = parser.parse_args(arguments)
    rounds: dict[str, list[Figures]] = {arm: [] for arm in ("one", *options.arms)}
    with ExitStack() as stack:
        arms = {}
        for name in rounds:
            flags = (*flags_of(name, options.ranks), *options.flags)
            arms[name] = Arm(flags, options.prompt + options.steps)
            stack.callback(arms[name].close)
        about = {name: arm.ask("about") for name, arm in arms.items()}
        for arm in arms.values():
            measure(arm, options.prompt, options.streams, 4)  # warm
        before = Ticks.now()
        for number in range(options.rounds):
            for name in itertools.islice(
                itertools.cycle(arms), number % len(arms), number % len(arms) + len(arms)
            ):
                rounds[name].append(measure(arms[name], options.prompt, options.streams, options.steps))
        others = Ticks.now().others_since(before, os.cpu_count() or 1)
    print(*table(rounds), sep="\n")
    for name, found in about.items():
        private = ", ".join(f"{size / 2**20:.0f}" for size in found["private"])
        weights = ", ".join(f"{size / 2**20:.1f}" for size in found["weights"])
        print(
            f"\n{name}: {found['computes']}; MiB of its own: {private}"
            + (f"; of weights: {weights}" if weights else "")
        )
    print(f"\n{options.rounds} rounds; others used {100 * others:.0f}% of the cores meanwhile.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
