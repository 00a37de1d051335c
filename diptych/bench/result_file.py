"""Results as JSON: a list with one flat object for each load.

The keys are those of `vllm bench serve --save-result` (`median_ttft_ms`, `output_throughput`,
`request_goodput`, …), those of SGLang's bench_serving beside them where it has other names
(`mean_e2e_latency_ms`, `input_throughput`, `concurrency`), and our own: `spread`, `errors_by_code`,
`generator_…`, `…_handoff_ms`. Counts (`num_prompts`, `completed`, `failed`, `short_outputs`,
`total_…_tokens`) and `duration` are sums over all rounds; rates and times are medians of the rounds' own,
and what begins with `max_` is the largest of a round.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from diptych.bench.campaign import LoadResult
from diptych.bench.load import INFINITE


@dataclass(frozen=True)
class RunDescription:
    """Description of a run, for all loads of a file. `tokenizer_id` None: the server counts tokens."""

    backend: str
    model_id: str
    tokenizer_id: str | None
    dataset_name: str
    label: str | None
    seed: int
    arguments: Mapping[str, Any]


def as_objects(
    results: Sequence[LoadResult], described: RunDescription, *, detailed: bool
) -> list[dict[str, Any]]:
    """`detailed` adds vLLM's lists with an entry for each request, over all rounds."""
    date, machine = datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), _environment()
    return [
        {
            "date": date,
            "backend": described.backend,
            "endpoint_type": described.backend,
            "label": described.label,
            "model_id": described.model_id,
            "tokenizer_id": described.tokenizer_id,
            "dataset_name": described.dataset_name,
            "seed": described.seed,
            "num_prompts": result.requests,
            "request_rate": _rate(result.load.request_rate),
            "burstiness": result.load.burstiness,
            "max_concurrency": result.load.max_concurrency,
            "rounds": len(result.rounds),
            **result.figures(),
            "errors_by_code": result.errors(),
            "generator_bottleneck": result.bottleneck(),
            "spread": result.spread(),
            "environment": machine,
            "arguments": _in_json(described.arguments),
            **(_details(result) if detailed else {}),
        }
        for result in results
    ]


def write(path: Path, objects: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(objects, indent=1, allow_nan=False, default=str) + "\n")


def _details(result: LoadResult) -> dict[str, Any]:
    outcomes = sorted((one for run in result.runs for one in run.outcomes), key=lambda one: one.sent)
    replies = [one.reply for one in outcomes]
    return {
        "start_times": [one.sent for one in outcomes],
        "input_lens": [reply.prompt_tokens if reply else 0 for reply in replies],
        "output_lens": [reply.output_tokens if reply else 0 for reply in replies],
        "ttfts": [one.ttft if one.reply else 0.0 for one in outcomes],
        "itls": [one.itl if one.reply else [] for one in outcomes],
        "generated_texts": [reply.text if reply else "" for reply in replies],
        "errors": [str(one.error) if one.error else "" for one in outcomes],
    }


def _in_json(value: Any) -> Any:
    """Return an option as it was given; `--request-rate inf` as text: JSON's numbers are finite."""
    if isinstance(value, Mapping):
        return {name: _in_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rate(rate: float | None) -> float | str:
    return "trace" if rate is None else "inf" if rate == INFINITE else rate


def _environment() -> dict[str, Any]:
    """Return the machine and versions of the figures. The load average tells what else ran before."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.release(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {name: _version(name) for name in ("diptych", "grpcio", "aiohttp")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
