"""`python -m lab.replays AZURE.csv MOONCAKE.jsonl`: figures of replayed traces, on virtual time.

1. Routing of the Mooncake conversations on 2+2 workers, by cost, to the longest prefix, by turns and at
   random, at several rates: TTFT, and cached tokens beside those that an oracle finds.
2. The greatest rate a worker within the service level, for each prefill:decode ratio of eight workers, and
   in the best of these ratios by the number of workers.

Llama 3.1 8B on H200s, by the planner's roofline. Writes JSON and pictures into --results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.planner.capacity import worker_of
from diptych.planner.hardware import find_accelerator
from diptych.planner.model_costs import model_costs
from diptych.planner.rates import Roofline
from diptych.replay.fleet import BLOCK_SIZE, ReplayFleet, ServiceGoal
from diptych.replay.replay import Replay
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Routing
from diptych.replay.step_times import StepTimes
from diptych.replay.sweep import greatest_rate
from diptych.replay.trace_file import Traffic, read_trace
from gateway.worker_pool.local_prefill import HANDOFF_S

LLAMA_31_8B = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
CARD = "h200"
MAX_BATCH = 256
ROUTING_RATES = (0.8, 1.2, 1.6, 2.0)
SIZES = (2, 8, 32, 64)
SHARE = 0.9
REQUESTS = 1_500
"""Requests of a search at least."""
WORKER_REQUESTS = {"azure": 200, "mooncake": 40}
"""Requests of a search for each worker: at the rates of Azure's, 40 come in two seconds."""
GOALS = {"azure": ServiceGoal(0.5, 0.03), "mooncake": ServiceGoal(3.0, 0.05)}
BEGINS = {"azure": 16.0, "mooncake": 0.4}
"""Requests a second and worker at which the search begins."""


@dataclass(frozen=True)
class Search:
    """Search of the greatest rate of a fleet."""

    trace: Path
    name: str
    prefill: int
    decode: int
    requests: int

    def run(self) -> ReplayResult:
        """Return the replay at the greatest rate within the service level."""
        base, chosen = Traffic(read_trace(self.trace), self.requests), fleet(self.prefill, self.decode)

        def at(rate: float) -> ReplayResult:
            return Replay(chosen, GOALS[self.name]).run(base.at_rate(rate).requests())

        return greatest_rate(at, BEGINS[self.name] * chosen.workers, SHARE)


def fleet(prefill: int, decode: int, routing: Routing = Routing.COST) -> ReplayFleet:
    """Return workers of one H200 each, with KV in fp8."""
    costs = model_costs(shape_from_config(resolve_config(LLAMA_31_8B), tied=False), "bf16", "fp8")
    card = find_accelerator(CARD)
    return ReplayFleet(
        prefill,
        decode,
        StepTimes(Roofline(costs, card), costs.kv_bytes / card.link, HANDOFF_S),
        blocks=worker_of(costs, card.memory).streams(BLOCK_SIZE),
        max_tokens=131072,
        max_batch=MAX_BATCH,
        routing=routing,
    )


def routed(trace: Path, rate: float, routing: Routing) -> dict[str, Any]:
    """Replay the whole trace on 2+2 workers with one rule of routing."""
    rows = read_trace(trace)
    traffic = Traffic(rows, len(rows)).at_rate(rate)
    result = Replay(fleet(2, 2, routing), GOALS["mooncake"]).run(traffic.requests())
    return {**result.as_json(), "rate": rate}


def search_json(result: ReplayResult) -> dict[str, Any]:
    """Return what is kept of a search."""
    return {**result.as_json(), "workers": result.fleet.workers}


def by_size(
    trace: Path, name: str, sizes: Sequence[int], share: float, pool: ProcessPoolExecutor
) -> list[dict[str, Any]]:
    """Return searches by the number of workers, `share` of which are prefill workers."""
    runs = []
    for size in sizes:
        prefill = min(max(round(size * share), 1), size - 1)
        runs.append(
            pool.submit(
                Search(trace, name, prefill, size - prefill, max(REQUESTS, WORKER_REQUESTS[name] * size)).run
            )
        )
    return [search_json(one.result()) for one in runs]


def by_ratio(trace: Path, name: str, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Return every ratio of eight workers."""
    runs = [pool.submit(Search(trace, name, one, 8 - one, REQUESTS).run) for one in range(1, 8)]
    return [search_json(one.result()) for one in runs]


def draw_routing(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Draw TTFT and cached tokens over the rate, a line for each rule."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle("Mooncake conversations on 2+2 workers, replayed")
    panels = (
        ("p50_ttft_ms", "TTFT p50, ms"),
        ("p90_ttft_ms", "TTFT p90, ms"),
        ("hit_rate", "cached prompt tokens"),
    )
    for panel, (name, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for routing in Routing:
            own = [one for one in results if one["routing"] == routing.value]
            panel.plot(
                [one["rate"] for one in own], [one[name] for one in own], marker="o", label=routing.value
            )
        panel.set_ylabel(label)
        panel.set_xlabel("requests/s offered")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=90)


def draw_goodput(path: Path, found: dict[str, Any]) -> None:
    """Draw goodput a worker by the number of workers, and by ratio."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"Goodput a worker, {SHARE:.0%} of answers within the service level, replayed")
    sizes, *ratios = figure.subplots(1, 3)
    for name in GOALS:
        own = found["by_size"][name]
        sizes.plot(
            [one["workers"] for one in own],
            [one["goodput_per_worker"] for one in own],
            marker="o",
            label=name,
        )
        for one in own:
            label = f"{one['prefill_workers']}:{one['decode_workers']}"
            sizes.annotate(label, (one["workers"], one["goodput_per_worker"]), fontsize="x-small")
    sizes.set_xscale("log", base=2)
    sizes.set_xlabel("workers, in the ratio that is best of eight")
    for panel, name in zip(ratios, GOALS, strict=True):
        own = found["by_ratio"][name]
        labels = [f"{one['prefill_workers']}:{one['decode_workers']}" for one in own]
        panel.bar(labels, [one["goodput_per_worker"] for one in own])
        panel.set_xlabel(f"prefill : decode of eight workers, {name}")
    for panel in (sizes, *ratios):
        panel.set_ylabel("requests/s a worker")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    sizes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=90)


def _routings(trace: Path, pool: ProcessPoolExecutor) -> Iterator[dict[str, Any]]:
    runs = [pool.submit(routed, trace, rate, routing) for routing in Routing for rate in ROUTING_RATES]
    for run in runs:
        yield run.result()


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m lab.replays", description=__doc__)
    parser.add_argument("azure", type=Path)
    parser.add_argument("mooncake", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--goodput-only", action="store_true")
    parser.add_argument("--sizes-of", choices=list(GOALS), help="search sizes of this trace only")
    options = parser.parse_args(arguments)
    traces = {"azure": options.azure, "mooncake": options.mooncake}
    with ProcessPoolExecutor(options.processes) as pool:
        if options.sizes_of is not None:
            found = json.loads((options.results / "replayed-goodput.json").read_text())
            _add_sizes(found, options.sizes_of, traces[options.sizes_of], options, pool)
            draw_goodput(options.results / "replayed-goodput.png", found)
            return
        if not options.goodput_only:
            routing = list(_routings(options.mooncake, pool))
            draw_routing(options.results / "replayed-routing.png", routing)
            _write(options.results / "replayed-routing.json", routing)
        found = {
            "by_ratio": {name: by_ratio(trace, name, pool) for name, trace in traces.items()},
            "by_size": {},
        }
        _write(options.results / "replayed-goodput.json", found)
        for name, trace in traces.items():
            _add_sizes(found, name, trace, options, pool)
    draw_goodput(options.results / "replayed-goodput.png", found)


def _add_sizes(
    found: dict[str, Any], name: str, trace: Path, options: argparse.Namespace, pool: ProcessPoolExecutor
) -> None:
    """Search a trace's sizes in its best ratio, keep those found earlier, and write all that is known."""
    best = max(found["by_ratio"][name], key=lambda one: one["goodput_per_worker"])
    share = best["prefill_workers"] / best["workers"]
    earlier = [one for one in found["by_size"].get(name, ()) if one["workers"] not in options.sizes]
    new = by_size(trace, name, options.sizes, share, pool)
    found["by_size"][name] = sorted([*earlier, *new], key=lambda one: one["workers"])
    _write(options.results / "replayed-goodput.json", found)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
