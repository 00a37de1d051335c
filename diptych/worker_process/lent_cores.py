"""Cores and turns that the workers of one machine lend each other."""

from __future__ import annotations

import logging

import torch

from diptych.engine.shared_backlog import SharedBacklog
from diptych.engine.shared_cores import SharedCores
from diptych.worker_process.config import WorkerSettings

log = logging.getLogger(__name__)


def shared_cores(settings: WorkerSettings, device: torch.device) -> SharedCores | None:
    """Return the cores that workers lend each other; None on a device, whose steps need none of them."""
    if settings.cores_fd is None or device.type != "cpu":
        return None
    return SharedCores(settings.cores_fd, home=_home(settings), cores=settings.machine_cores)


def shared_backlog(settings: WorkerSettings, device: torch.device) -> SharedBacklog | None:
    """Return the waiting times of the workers on one GPU; None on a CPU, where they lie with the cores."""
    if settings.cores_fd is None or device.type != "cuda":
        return None
    gpu = torch.cuda.current_device() if device.index is None else device.index
    if not settings.hosted:
        log.info("GPU %d is shared with the workers of this machine: decode makes room for prompts", gpu)
    return SharedBacklog(settings.cores_fd, own=_home(settings)[0], cores=settings.machine_cores, gpu=gpu)


def _home(settings: WorkerSettings) -> list[int]:
    return [int(core) for core in settings.home_cores.split(",") if core]
