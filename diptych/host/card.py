"""Sharing of a GPU by the two workers of a process: streams, turns, and the interpreter's time."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace

import torch

from diptych.engine.backend import TwinBackend
from diptych.engine.card_streams import CardStreams, NoPartition, partition_streams, priority_streams
from diptych.engine.card_turns import CardTurns
from diptych.engine.device import choose_device
from diptych.engine.loaded_model import Model
from diptych.host.flags import Sharing
from diptych.runtime.settings import StartupError
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.engine_loader import Beside

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""Seconds that a thread may keep the interpreter while another waits for it (Python's own: 0.005). Launching
a prompt step takes 11 ms of Python; a decode step of 5 ms whose launch waits its turn would be late."""


class CannotShare(StartupError):
    """A GPU that cannot be shared in the chosen way."""


@dataclass(frozen=True)
class Card:
    """The shared device of a pair of workers."""

    decode: Beside
    prefill: Beside
    how: str
    """The way of sharing, in words."""


def share_card(sharing: Sharing, settings: WorkerSettings) -> Card:
    """Prepare the device for both workers of this process. Call it on the event loop's thread.

    Raises CannotShare, DeviceUnavailable.
    """
    device = choose_device(settings.device)
    if device.type != "cuda":
        return _share_cpu(sharing, settings)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    sys.setswitchinterval(SWITCH_S)
    streams = _streams(sharing, device)
    # What the event loop queues (copies of blocks, recordings) belongs to decode steps, in their order.
    torch.cuda.set_stream(streams.decode)
    turns = CardTurns() if sharing.kind == "turns" else None
    paced = sharing.kind == "streams"  # turns are the pace of the one, a part of the card is the other's own
    return Card(
        Beside(stream=streams.decode, turns=turns, paced=paced),
        Beside(stream=streams.prefill, turns=turns, paced=paced),
        f"{device} computes both phases over one copy of the weights, {_in_words(sharing, streams)}",
    )


def _share_cpu(sharing: Sharing, settings: WorkerSettings) -> Card:
    """Share the CPU, where the native step lends cores; the other backends take turns."""
    if sharing.kind != "turns":
        raise CannotShare(f"--gpu-sharing {sharing.kind} needs a GPU, and these workers compute on the CPU")
    lends = settings.backend in ("auto", "native")
    turns = None if lends else CardTurns()
    how = "lending cores" if lends else "by turns"
    return Card(Beside(turns=turns), Beside(turns=turns), f"the CPU computes both phases, {how}")


def _streams(sharing: Sharing, device: torch.device) -> CardStreams:
    if sharing.kind != "partition":
        return priority_streams(device)
    try:
        return partition_streams(device, sharing.multiprocessors)
    except (NoPartition, OSError) as error:
        raise CannotShare(f"--gpu-sharing partition: {error}") from error


def _in_words(sharing: Sharing, streams: CardStreams) -> str:
    if streams.multiprocessors is not None:
        decode, prefill = streams.multiprocessors
        return f"decode on {decode} multiprocessors, prefill on {prefill}"
    return "by turns" if sharing.kind == "turns" else "at once, decode steps first"


def over_same_weights(model: Model) -> Model | None:
    """Return a second model over the weights of `model`; None where its backend loads them again.

    The native step is such a backend: it maps what lies once for all processes of the machine.
    """
    backend = model.backend
    if not isinstance(backend, TwinBackend):
        return None
    twin = replace(model, backend=backend.twin())
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # weights were written on one stream, and are read on two
    return twin
