"""Runs as JSON, and the file that gathers them: one run for each precision and number of threads."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diptych.engine.loaded_model import Model
from lab.roofline.ceilings import Ceilings
from lab.roofline.measure import CHUNK, Point
from lab.roofline.work import FORMAT_OF, Work, decode_work, prefill_work, roof, weight_size


def as_object(
    model: Model, dtype: str, file_bytes: int | None, ceilings: Ceilings, points: Sequence[Point]
) -> dict[str, Any]:
    """Return a run with the roofline beside each of its points."""
    shape, itemsize = model.shape, model.kv_layout(1).dtype.itemsize
    weights = weight_size(shape, dtype, file_bytes)

    def work(point: Point) -> Work:
        if point.kind == "decode":
            return decode_work(shape, weights, itemsize, point.batch, point.tokens)
        return prefill_work(shape, weights, itemsize, point.tokens, CHUNK)

    described = []
    for point in points:
        needed = work(point)
        limit = roof(needed, ceilings, dtype, itemsize)
        described.append(
            {**asdict(point), **asdict(needed), "roof_seconds": limit.seconds, "bound": limit.bound}
        )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "dtype": dtype,
        "threads": ceilings.threads,
        "format": FORMAT_OF[dtype],
        "backend": model.backend_name,
        "weight_bytes": weights.nbytes,
        "kv_bytes_a_token": model.kv_layout(1).bytes_per_block,
        "ceilings": asdict(ceilings),
        "points": described,
        "machine": {"cpu": _cpu(), "cpus": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {name: version(name) for name in ("diptych", "torch")},
    }


def gather(path: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Adds `run` to the file, in place of an earlier one of the same precision and threads."""
    kept = [one for one in read(path) if (one["dtype"], one["threads"]) != (run["dtype"], run["threads"])]
    runs = sorted([*kept, run], key=lambda one: (one["dtype"], one["threads"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")
    return runs


def read(path: Path) -> list[dict[str, Any]]:
    """Read all runs of a file; none when there is no file. Raises ValueError for what is no JSON."""
    if not path.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(path.read_text())
    return runs


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
