"""The way of a step's numbers through the stages of a pipeline.

    hidden rows   from each rank of a stage to the rank of the same number in the next one
    logits        from the first rank of the last stage to that of the first, which samples
    features      of tapped layers, which drafting heads read: with the hidden rows, then with the logits

Each way is a communicator of two processes, of which the receiving one is rank 0. All ranks of a stage have
the same hidden rows, so that none is gathered or cut on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from diptych.engine.parallel.communicator import Alone, Communicator


@dataclass(frozen=True)
class Links:
    """Ends that a process of a group holds; a way that it is not on is None."""

    ranks: Communicator
    """The ranks of its own stage."""
    before: Communicator | None = None
    after: Communicator | None = None
    home: Communicator | None = None
    """Way from the last stage to the first, for the first rank of both."""

    @property
    def leads(self) -> bool:
        """True for the process that gets the logits."""
        return self.before is None and self.ranks.rank == 0

    @property
    def is_alone(self) -> bool:
        """True for a process that exchanges nothing."""
        return self.ranks.ranks == 1 and not self._ways

    @property
    def on_device(self) -> bool:
        """True if no exchange comes to the host (`Communicator.on_device`)."""
        return all(way.on_device for way in (self.ranks, *self._ways))

    @property
    def _ways(self) -> list[Communicator]:
        return [way for way in (self.before, self.after, self.home) if way is not None]


ALONE = Links(Alone())
"""The ends of a process that is no group."""


def send(way: Communicator, numbers: torch.Tensor) -> None:
    """Send a tensor; returns when the other process has come for it. Raises GroupBroken."""
    way.gather(numbers)


def receive(way: Communicator, like: torch.Tensor) -> torch.Tensor:
    """Return the other process' tensor, which has the shape and type of `like`. Raises GroupBroken."""
    everything = way.gather(like)
    assert everything is not None, "the receiving process is rank 0"
    return everything[1]


def send_with(way: Communicator, rows: torch.Tensor, features: Mapping[int, torch.Tensor]) -> None:
    """Send hidden rows `[T, H]`, and as many of each layer's features beside them. Raises GroupBroken."""
    send(way, torch.cat([rows, *(features[layer] for layer in sorted(features))], dim=1))


def receive_with(
    way: Communicator, like: torch.Tensor, layers: Iterable[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return hidden rows that are like `like`, and the features of these layers. Raises GroupBroken."""
    ordered = sorted(set(layers))
    came = receive(way, like.repeat(1, 1 + len(ordered)))
    rows, *features = came.split(like.shape[1], dim=1)
    return rows.contiguous(), dict(zip(ordered, features, strict=True))
