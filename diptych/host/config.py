"""Settings of the hosting program and of its two workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from decode_worker.config import DecodeSettings
from diptych.host.flags import ENGINE_FIELDS, SHARING, split_flags
from diptych.runtime.settings import ProgramSettings, StartupError, internal
from diptych.worker_process.config import WorkerSettings
from prefill_worker.config import PrefillSettings


class HostSettings(ProgramSettings):
    """Host a prefill and a decode worker in one process. `diptych up` starts it; it is no command."""

    program: ClassVar[str] = "pair"

    gpu_sharing: Annotated[str, Field(pattern=f"^({SHARING})$")] = internal(
        "turns", "How prefill and decode share the GPU."
    )


@dataclass(frozen=True)
class HostedSettings:
    """Settings of the program and of its two workers."""

    own: HostSettings
    prefill: PrefillSettings
    decode: DecodeSettings


def read_settings(argv: Sequence[str]) -> HostedSettings:
    """Read the program's flags and those of the workers behind them; exits as `from_argv` does.

    Raises DifferentEngines, or StartupError where the workers' flags are missing.
    """
    own, workers = split_flags(argv)
    if set(workers) != {"prefill", "decode"}:
        raise StartupError("the flags of a prefill and of a decode worker are wanted, each behind `-- ROLE`")
    settings = HostedSettings(
        HostSettings.from_argv(own),
        PrefillSettings.from_argv(workers["prefill"]),
        DecodeSettings.from_argv(workers["decode"]),
    )
    check_one_engine(settings.prefill, settings.decode)
    return settings


class DifferentEngines(StartupError):
    """Workers whose settings want two engines: they cannot share one copy of the weights."""


def check_one_engine(prefill: WorkerSettings, decode: WorkerSettings) -> None:
    """Check that both workers can compute with the same weights. Raises DifferentEngines."""
    if (why := why_two_engines(prefill, decode)) is not None:
        raise DifferentEngines(f"prefill and decode in one process: {why}")


def why_two_engines(prefill: WorkerSettings, decode: WorkerSettings) -> str | None:
    """Return why two workers cannot share one copy of the weights; None if they can."""
    for field in ENGINE_FIELDS:
        if getattr(prefill, field) != getattr(decode, field):
            return f"--{field.replace('_', '-')} differs between the two"
    for one in (prefill, decode):
        if one.in_parts:
            return f"{one.group_flags} takes processes of its own"
    return None
