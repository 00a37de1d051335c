"""Turns on one card: who gets it, how long prompts may have it, and that the two never have it at once."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from diptych.engine.card_turns import CardTurns, Waiting, next_turn

PROMPT_S, STEP_S = 0.050, 0.012


@pytest.mark.parametrize(
    ("prompts", "streams", "streams_run", "owed_s", "phase"),
    [
        (False, False, False, 0.0, None),
        (True, False, False, 0.0, "prompts"),
        (False, True, True, 0.0, "streams"),
        (True, True, True, 0.0, "prompts"),  # a prompt that queues goes first
        (True, True, True, 0.01, "streams"),  # but for what the streams are owed
        (True, False, True, 0.01, None),  # their next step is about to come
        (True, False, False, 0.01, "prompts"),  # nothing is left to decode
    ],
)
def test_next_turn(prompts, streams, streams_run, owed_s, phase):
    assert next_turn(Waiting(prompts, streams, streams_run, owed_s)) == phase


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_share_leaves_something_to_both(share):
    with pytest.raises(ValueError, match="share"):
        CardTurns(share)


class Card:
    """Two loops that take turns, on a clock of their own."""

    def __init__(self, share: float) -> None:
        self.now = 0.0
        self.turns = CardTurns(share, clock=lambda: self.now)
        self.busy_s = {"prompts": 0.0, "streams": 0.0}
        self.longest_gap_s = 0.0
        self._last_step = 0.0
        self._inside: str | None = None

    def compute(self, phase: str, seconds: float) -> None:
        assert self._inside is None, "both have the card"
        self._inside = phase
        self.now += seconds
        self.busy_s[phase] += seconds
        self._inside = None

    async def prompts(self, count: int) -> None:
        for _ in range(count):
            await self.turns.begin_prompts()
            self.compute("prompts", PROMPT_S)
            self.turns.end_prompts()
            await asyncio.sleep(0)

    async def streams(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self.turns.begin_streams()
            self.compute("streams", STEP_S)
            self.turns.count_streams(STEP_S)
            self.longest_gap_s = max(self.longest_gap_s, self.now - self._last_step)
            self._last_step = self.now
            self.turns.end_streams()
            await asyncio.sleep(0)
        self.turns.end_streams(idle=True)


async def run(card: Card, prompts: int) -> None:
    over = asyncio.Event()
    streams = asyncio.create_task(card.streams(over))
    await card.prompts(prompts)
    over.set()
    await streams


@pytest.mark.parametrize("share", [0.3, 0.5, 0.65, 0.8])
async def test_prompts_get_their_share_while_streams_run(share):
    card = Card(share)
    await run(card, 200)
    got = card.busy_s["prompts"] / sum(card.busy_s.values())
    # The debt is paid in whole steps: what a step is too long is lost to the prompts.
    assert share * PROMPT_S / (PROMPT_S + STEP_S) < got <= share + 0.02


async def test_no_stream_waits_longer_than_one_prompt_step():
    card = Card(0.8)
    await run(card, 100)
    assert card.longest_gap_s <= PROMPT_S + STEP_S + 1e-9


async def test_prompts_have_the_card_to_themselves_while_nothing_decodes():
    card = Card(0.5)
    await card.prompts(50)
    assert card.now == pytest.approx(50 * PROMPT_S)


async def test_decode_steps_follow_each_other_while_no_prompt_waits():
    card = Card(0.5)
    await card.turns.begin_streams()
    assert card.turns.may_go_on
    card.turns.count_streams(STEP_S)
    waiting = asyncio.create_task(card.turns.begin_prompts())
    await asyncio.sleep(0)
    assert not card.turns.may_go_on, "a prompt waits, and the streams are owed nothing"
    card.turns.end_streams()
    await waiting
    card.compute("prompts", PROMPT_S)
    card.turns.end_prompts()
    assert card.turns.owed_s == pytest.approx(PROMPT_S)
    await card.turns.begin_streams()
    again = asyncio.create_task(card.turns.begin_prompts())
    await asyncio.sleep(0)
    assert card.turns.may_go_on, "the streams are owed more than two steps"
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_cancelled_wait_leaves_the_card_to_others():
    for cancel_late in itertools.islice((False, True), 2):
        card = Card(0.5)
        await card.turns.begin_streams()
        waiting = asyncio.create_task(card.turns.begin_prompts())
        await asyncio.sleep(0)
        if cancel_late:
            card.turns.end_streams(idle=True)  # it has the turn, and does not know
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        card.turns.end_streams()
        async with asyncio.timeout(5):
            await card.turns.begin_streams()
