"""Ranks whose hosts run ahead of their devices stop before the same layer, however they come along.

A model of hosts and devices: a host looks at the word before a layer, once its device has done all but so
many of the layers that it has launched, and launches the layer. A device does a layer when the hosts of all
ranks have launched it, for it exchanges numbers there.
"""

from __future__ import annotations

import random

import pytest

from diptych.engine.parallel.stop_word import StopWord, first_common_layer

LAYERS, RANKS = 12, 3


class Ranks:
    """Ranks that compute one step, of which rank 0 learns at `aborted` that nobody wants it."""

    def __init__(self, ahead: int, lag: int, seed: int) -> None:
        self.word, self.ahead, self.lag = StopWord(), ahead, lag
        self.chance = random.Random(seed)
        self.aborted = self.chance.randrange(LAYERS)
        self.launched, self.done = [0] * RANKS, [0] * RANKS
        self.ended: list[int | None] = [None] * RANKS
        # One rank's host is often far slower than the others.
        self.weights = [self.chance.choice([1, 5, 50]) for _ in range(2 * RANKS)]

    def run(self) -> set[int | None]:
        """Let hosts and devices go on in any order, until none can; return where the ranks ended."""
        waiting = 0
        while waiting < 2000:
            (which,) = self.chance.choices(range(2 * RANKS), self.weights)
            moved = self._host(which) if which < RANKS else self._device(which - RANKS)
            waiting = 0 if moved else waiting + 1
        return {*self.ended}

    def _host(self, rank: int) -> bool:
        layer = self.launched[rank]
        if self.ended[rank] is not None or self.done[rank] < layer - self.ahead:
            return False
        if rank == 0 and layer >= self.aborted:
            self.word.stop_before(layer + self.lag)
        if layer == LAYERS or self.word.stops(layer):
            self.ended[rank] = layer
        else:
            self.launched[rank] += 1
        return True

    def _device(self, rank: int) -> bool:
        layer = self.done[rank]
        if layer >= min(self.launched):
            return False
        self.done[rank] += 1
        return True


@pytest.mark.parametrize("ahead", [0, 2])
def test_every_rank_stops_before_the_same_layer(ahead: int) -> None:
    lag = first_common_layer(0, ahead)
    for seed in range(300):
        ranks = Ranks(ahead, lag, seed)
        assert ranks.run() == {min(LAYERS, ranks.aborted + lag)}, seed


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_layer_earlier_some_rank_may_have_gone_on(ahead: int) -> None:
    """The control: ranks that ended before different layers wait for one another for ever."""
    lag = first_common_layer(0, ahead) - 1
    assert any(len(Ranks(ahead, lag, seed).run()) > 1 for seed in range(300))
