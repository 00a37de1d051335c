"""Results of a run of all sections: JSON for machines, Markdown for readers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lab.gpu import targets
from lab.gpu.section import Figure

_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")


@dataclass(frozen=True)
class Outcome:
    """Figures or error of one section."""

    section: str
    figures: tuple[Figure, ...]
    error: str | None
    """Cause for which it gave no more; None when it is whole."""
    seconds: float


def described(device: torch.device) -> dict[str, Any]:
    """Describe the machine and the versions that the figures hold for."""
    found: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M")}
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    if device.type == "cuda" and torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(device)
        found["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return found


def save(
    folder: Path,
    machine: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    earlier: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write `<date>-gpu.json` and `.md` and return the latter's path. Overwrites those of the same day.

    Sections of `earlier` calls count among the targets, which only the latter has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{str(machine['date'])[:10]}-gpu"
    sections = [asdict(outcome) for outcome in outcomes]
    data = {"machine": dict(machine), "sections": sections}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text(f"{markdown(machine, outcomes)}\n{targets.markdown([*earlier, *sections])}")
    return path


def markdown(machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Render all sections as tables; a failed section shows its error."""
    lines = [f"# {machine.get('device', 'no CUDA device')}, {machine['date']}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items() if value is not None), ""]
    for outcome in outcomes:
        lines += [f"## {outcome.section} ({outcome.seconds:.0f} s)", ""]
        if outcome.figures:
            lines += ["| what | value | ratio | against | target | note |", "|---|---|---|---|---|---|"]
            lines += [_row(figure) for figure in outcome.figures]
            lines.append("")
        if outcome.error is not None:
            lines += [f"Not measured: {outcome.error}", ""]
    return "\n".join(lines)


def _row(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    target = "" if figure.target is None else f"{figure.target:g} {'met' if figure.met else '**missed**'}"
    cells = (figure.name, f"{figure.value:.4g} {figure.unit}", ratio, figure.against, target, figure.note)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
