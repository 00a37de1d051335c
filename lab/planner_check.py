"""`python -m lab.planner_check`: what `diptych plan --bench` predicts, beside what `diptych bench` measures.

For each model and each shape of requests: closed loops of `diptych bench` calibrate (a lone client with four
prompt lengths, then more clients). The product's replay then predicts Poisson arrivals at several rates, and
`diptych bench` sends the same arrivals to the same server, at once: the speed of a machine that is shared
changes within minutes. Compared are the median TTFT at shares of the predicted knee, and the knee: the most
requests a second that are answered when far more are offered.

What was measured goes into --results at once, model by model and shape by shape, so that a run may be cut
into pieces; `--compare` measures nothing and compares what the file holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decode_worker.local_schedule import LocalBounds
from diptych.bench.campaign import SEEDS_PER_RUN
from diptych.bench.datasets.traces import TraceRow
from diptych.bench.load import arrival_times
from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.planner.measured_rates import Measured
from diptych.planner.model_costs import model_costs
from diptych.planner.model_shape import read_shape
from diptych.replay.fleet import ReplayFleet, ServiceGoal
from diptych.replay.replay import Replay
from diptych.replay.result import ReplayResult
from diptych.replay.step_times import StepTimes
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import resolve_model
from lab.gpu.llama_folder import write_llama_folder
from lab.peers.process import RunningServer
from lab.peers.servers import diptych
from prefill_worker.scheduler import ENOUGH_ON_CPU

Json = dict[str, Any]
SHARES = (0.3, 0.6, 0.8)
"""Shares of the predicted knee at which the median TTFT is compared."""
BEYOND = 2.5
"""Load by which the measured knee is found, in predicted knees."""
LENGTHS = (32, 128, 256, 448)
"""Tokens of the prompts of a lone client."""
SHORT, EVEN = (16, 64), (128, 32)
"""Tokens of prompt and answer of the loads with several clients: steps alone, and beside prompts."""
CLIENTS = (2, 4, 8, 16, 32, 64)
SECONDS, LEAST, MOST = 20, 24, 160
"""Seconds of a load of Poisson arrivals, and its least and most requests."""
BLOCKS = 4096
"""Blocks of the pool: more than any of these loads needs."""


@dataclass(frozen=True)
class Shape:
    """Requests of one kind: tokens of a prompt and of its answer."""

    name: str
    input: int
    output: int


SHAPES = (Shape("chat", 128, 64), Shape("long prompts", 448, 24), Shape("long answers", 64, 128))
LLAMA_360M = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vocab_size": 49152,
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "max_position_embeddings": 8192,
}
"""The shape of SmolLM2-360M. Its weights are random: times do not depend on them."""
MODELS = ("bundled", "llama-360m")


def model_path(name: str, folder: Path) -> str:
    """Return what `--model` takes; writes the files of a random model where they are missing."""
    if name == "bundled":
        return name
    made = folder / name
    if not made.exists():
        shape = shape_from_config(resolve_config(LLAMA_360M), tied=False)
        write_llama_folder(made, shape, torch.device("cpu"), torch.bfloat16)
    return str(made)


def kv_share(model: str, dtype: str) -> float:
    """Return the bytes of a token's keys and values over those that a lone step reads of the weights."""
    costs = model_costs(read_shape(resolve_model(model)), dtype, "fp32")
    return costs.kv_bytes / costs.step_bytes(1)


@dataclass
class Bench:
    """`diptych bench` on one server. Every load has a seed of its own, lest its prompts be cached."""

    address: str
    folder: Path
    seed: int = 1

    def load(self, shape: Shape, count: int, *flags: str) -> Json:
        """Return the figures of one load, with its seed and count."""
        self.seed += 1
        written = self.folder / "bench.json"
        command = [
            *module_command("diptych"),
            *("bench", "--address", self.address, "--no-progress", "--seed", str(self.seed)),
            *("--num-prompts", str(count), "--output-file", str(written)),
            *("--random-input-len", str(shape.input), "--random-output-len", str(shape.output), *flags),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (found,) = json.loads(written.read_text())
        kept = {name: value for name, value in found.items() if not isinstance(value, dict | list)}
        print(f"  {shape.name}, {' '.join(flags)}: {summary(found)}", file=sys.stderr, flush=True)
        return kept

    def closed(self, shape: Shape, clients: int, count: int) -> Json:
        """Return the figures of a closed loop."""
        return self.load(shape, count, "--max-concurrency", str(clients))

    def poisson(self, shape: Shape, rate: float) -> Json:
        """Return the figures of Poisson arrivals at `rate` requests a second."""
        count = min(max(round(rate * SECONDS), LEAST), MOST)
        return self.load(shape, count, "--request-rate", f"{rate:.4g}")


def summary(found: Json) -> str:
    """Return the figures of a load that a reader looks at first."""
    return (
        f"TTFT p50 {found['median_ttft_ms']:.0f} ms, TPOT p50 {found['median_tpot_ms']:.1f} ms, "
        f"{found['request_throughput']:.2f} requests/s"
    )


def calibrate(bench: Bench) -> list[Json]:
    """Return the loads that `diptych plan --bench` is given."""
    lone = [bench.closed(Shape("alone", length, 32), 1, 14) for length in LENGTHS]
    short = [bench.closed(Shape("short", *SHORT), clients, max(3 * clients, 8)) for clients in CLIENTS]
    even = [bench.closed(Shape("even", *EVEN), clients, 8 * clients) for clients in CLIENTS[:2]]
    return lone + short + even


@dataclass(frozen=True)
class Predictor:
    """Replays of one server, by its calibration."""

    calibration: Sequence[Json]
    kv_share: float
    """Bytes of a token's keys and values over those of the weights."""
    local: bool
    """Decode workers compute short prompts themselves (`local-prefill=auto`)."""

    def replay(self, shape: Shape, rate: float, count: int, seed: int) -> ReplayResult:
        """Replay the arrivals of a load of `diptych bench` on one prefill and one decode worker."""
        times = StepTimes.of_measured(Measured.of_results(self.calibration, self.kv_share))
        fleet = ReplayFleet(
            1,
            1,
            times,
            BLOCKS,
            max_tokens=8192,
            prefill_chunk=512,
            prefill_enough=ENOUGH_ON_CPU,
            local=LocalBounds() if self.local else None,
        )
        moments = arrival_times(count, rate, 1.0, seed * SEEDS_PER_RUN)
        return Replay(fleet, ServiceGoal()).run(TraceRow(at, shape.input, shape.output) for at in moments)

    def knee(self, shape: Shape) -> float:
        """Return the requests a second that are answered when far more are offered."""
        result = self.replay(shape, 1000.0, 200, 0)
        return result.completed / result.last_s


def measure(bench: Bench, predictor: Predictor, shape: Shape) -> list[Json]:
    """Return the measured loads of a shape: at shares of its predicted knee, and far beyond it."""
    knee = predictor.knee(shape)
    return [bench.poisson(shape, share * knee) for share in (*SHARES, BEYOND)]


@dataclass(frozen=True)
class Comparison:
    """A measured figure beside its prediction."""

    model: str
    shape: str
    figure: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    def row(self) -> str:
        """Return a line of a Markdown table."""
        return (
            f"| {self.model} | {self.shape} | {self.figure} | {self.measured:,.3g} | {self.predicted:,.3g} "
            f"| {self.ratio:.2f} |"
        )


def compare(results: Mapping[str, Json]) -> Iterator[Comparison]:
    """Yield every measured figure of a file beside what the planner predicts from its calibration."""
    for model, found in results.items():
        for shape in (one for one in SHAPES if one.name in found["shapes"]):
            measured = found["shapes"][shape.name]
            predictor = Predictor(
                measured["calibration"], found["kv_share"], found["local_prefill"] == "auto"
            )
            for load in measured["loads"]:
                rate = float(load["request_rate"])
                result = predictor.replay(shape, rate, load["num_prompts"], load["seed"])
                if load is measured["loads"][-1]:
                    knee = result.completed / result.last_s
                    yield Comparison(model, shape.name, "knee, requests/s", load["request_throughput"], knee)
                    continue
                ttft_ms = 1000 * (result.ttft.percentile(50) or 0.0)
                figure = f"TTFT p50 at {rate:.2f}/s, ms"
                yield Comparison(model, shape.name, figure, load["median_ttft_ms"], ttft_ms)


def table(found: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and how many figures lie within 20%."""
    yield "| model | shape | figure | measured | predicted | ratio |\n|---|---|---|---|---|---|"
    yield from (one.row() for one in found)
    within = sum(1 / 1.2 <= one.ratio <= 1.2 for one in found)
    yield f"\n{within} of {len(found)} within 20%."


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, write it, and print the table of all that the file holds."""
    parser = argparse.ArgumentParser(prog="python -m lab.planner_check", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    parser.add_argument(
        "--shape", action="append", choices=[one.name for one in SHAPES], help="only this one"
    )
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--local-prefill", default="never", choices=("never", "auto"), help="of the gateway")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()), help="of random models")
    parser.add_argument("--compare", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=Path("lab/results/planner/planner-check.json"))
    options = parser.parse_args(argv)
    results: dict[str, Json] = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.compare:
        for model in options.model or MODELS:
            _measure_model(model, options, results)
    print(*table(list(compare(results))), sep="\n")
    return 0


def _measure_model(model: str, options: argparse.Namespace, results: dict[str, Json]) -> None:
    name = model if options.local_prefill == "never" else f"{model}, local prefill"
    shapes = [one for one in SHAPES if options.shape is None or one.name in options.shape]
    with tempfile.TemporaryDirectory(prefix="diptych-planner-") as made:
        folder = Path(made)
        path = model_path(model, options.models)
        server = diptych(options.dtype, path)
        flags = ("--set", f"gateway.local-prefill={options.local_prefill}")
        server = replace(server, arguments=(*server.arguments, *flags), start_timeout_s=240.0)
        with RunningServer(server, folder) as up:
            bench = Bench(up.address, folder)
            found = results.setdefault(name, {"shapes": {}})
            found["kv_share"] = kv_share(path, options.dtype)
            found["local_prefill"] = options.local_prefill
            for shape in shapes:
                bench.seed = 100 * (1 + len(found["shapes"]))  # of a piece before, prompts were others
                calibration = calibrate(bench)
                predictor = Predictor(calibration, found["kv_share"], options.local_prefill == "auto")
                loads = measure(bench, predictor, shape)
                found["shapes"][shape.name] = {"calibration": calibration, "loads": loads}
                _write(options.results, results)


def _write(path: Path, results: Mapping[str, Json]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
