"""Inputs and outputs of a section of the GPU benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

NO_DEVICE = "no CUDA device"
_T = TypeVar("_T")


class Unmeasured(RuntimeError):
    """A figure that this machine cannot give; the text says why."""


@dataclass(frozen=True)
class Figure:
    """Measured number, beside what it is held against."""

    section: str
    name: str
    value: float
    unit: str
    against: str = ""
    """Reference of the ratio: a ceiling or a peer of the same run; empty where there is none."""
    ratio: float | None = None
    """Larger is better: speed over the ceiling's or the peer's."""
    target: float | None = None
    """Bound on the ratio where there is one, of the value otherwise."""
    met: bool | None = None
    """None where there is no target."""
    note: str = ""
    """Spread of the rounds, shapes, whatever a reader needs."""


def figure(
    section: str,
    name: str,
    value: float,
    unit: str,
    *,
    against: str = "",
    ratio: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Figure:
    """Make a Figure whose target is a bound from below or above on the ratio, or on the value without one."""
    held = value if ratio is None else ratio
    target = at_least if at_least is not None else at_most
    met = None
    if at_least is not None:
        met = held >= at_least
    elif at_most is not None:
        met = held <= at_most
    return Figure(section, name, value, unit, against, ratio, target, met, note)


@dataclass
class Context:
    """The run that a section is part of."""

    device: torch.device
    quick: bool
    """Fewer points and rounds: a look, not a result."""
    say: Callable[[str], None]
    """Printer of a line of progress."""
    measured: dict[str, float] = field(default_factory=dict)
    """Findings of earlier sections by name (see ceilings.py): later ones hold themselves against it."""
    vllm: Path | None = None
    """Command of the peer of the whole service; None: it is looked for."""
    dry: bool = False
    """Every line once, at tiny sizes, on the CPU and in Triton's interpreter: shows that it runs, no more."""

    def pick(self, whole: _T, quick: _T, dry: _T) -> _T:
        """Return the value for this kind of run."""
        return dry if self.dry else quick if self.quick else whole

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def needs(self, name: str) -> float:
        """Return a figure of an earlier section. Raises Unmeasured if it was not measured."""
        if name not in self.measured:
            raise Unmeasured(f"{name} was not measured in this run")
        return self.measured[name]


Section = Callable[[Context], Iterable[Figure]]


def device_of(context: Context) -> torch.device:
    """Return the CUDA device of a run; the CPU of a dry one. Raises Unmeasured where there is none."""
    if context.dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unmeasured(NO_DEVICE)
    if context.device.type != "cuda":
        raise Unmeasured(f"{context.device} is no CUDA device")
    return context.device
