"""500 requests of several choices or beams in pools that are too small for them, cancelled at random.

Whatever is preempted comes back as a gateway would send it. No request hangs, what finishes is what the same
model gives in one piece, and every block comes back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from functools import cache

import pytest

from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process import oracle
from tests.diptych.worker_process.both_workers import VOCABULARY, House, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work

REQUESTS = 250
AT_ONCE = 6
MAX_TOKENS = 14
STOP = (3, 17, 40)
SAMPLED = {"temperature": 1.2, "seed": 5}
PROMPTS = [tuple(random.Random(n).randrange(VOCABULARY) for _ in range(1 + 3 * n)) for n in range(6)]


@cache
def answers(prompt: tuple[int, ...]) -> list[list[int]]:
    made = oracle.choices(prompt, 5, MAX_TOKENS, stop=STOP, **SAMPLED)
    return [[sampled.token_id for sampled in answer] for answer in made]


@cache
def beams(prompt: tuple[int, ...], width: int) -> list[list[int]]:
    return [list(beam.token_ids) for beam in oracle.beams(prompt, width, width, MAX_TOKENS, stop=STOP)]


class Walk:
    """All requests over one decode and two prefill workers."""

    def __init__(self, made: House, seed: int, local: float = 0.3) -> None:
        """Have the decode worker compute a share `local` of the prompts itself."""
        self.local = local
        self.rng = random.Random(seed)
        self.house = made
        self.gateway = Gateway(made)
        self.outcomes: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()

    async def run(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                request = self.choices if self.rng.random() < 0.7 else self.beams
                await request(f"r{number}")

        trouble = asyncio.create_task(self.trouble())
        async with asyncio.timeout(250):
            await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)

    async def trouble(self) -> None:
        """Grants that are taken back, caches that are flushed."""
        loop = self.house.decodes[0].loop
        while True:
            await asyncio.sleep(self.rng.expovariate(20))
            if self.rng.random() < 0.3:
                loop.flush_prefix_cache()
            elif key := loop.requests.grants.abort_newest_grant():
                loop.requests.preempt_request(key)

    def start(self, name: str, prompt: tuple[int, ...], **changes: object) -> tuple[Heard, tuple[str, int]]:
        self.attempts[name] += 1
        key = (name, self.attempts[name])
        decode = self.house.decodes[0]
        if self.rng.random() < self.local:
            kind = work_pb2.LOCAL_PREFILL_FALLBACK
            message = work(key, prompt, MAX_TOKENS, stop=STOP, local=kind, **changes)
            return self.gateway.start_local(decode, message), key
        message = work(key, prompt, MAX_TOKENS, stop=STOP, **changes)
        prefill = self.rng.choice(self.house.prefills)
        return self.gateway.start(decode, prefill, message), key

    def cancel(self, key: tuple[str, int], choices: list[int]) -> None:
        workers = [self.house.decodes[0], *self.house.prefills]
        for worker in self.rng.sample(workers, len(workers)):
            worker.loop.requests.cancel(key, choices)

    async def choices(self, name: str) -> None:
        prompt, count = self.rng.choice(PROMPTS), self.rng.randint(1, 5)
        doomed = {c for c in range(count) if self.rng.random() < 0.2}
        heard, key = self.start(name, prompt, choices=range(count), sampling=SAMPLED)
        if doomed:
            await asyncio.sleep(self.rng.expovariate(100))
            self.cancel(key, [] if len(doomed) == count else sorted(doomed))
            self.outcomes["choice cancelled"] += len(doomed)
        alive = [c for c in range(count) if c not in doomed]
        await asyncio.gather(*(self.follow(name, prompt, choice, heard) for choice in alive))
        for choice in doomed:
            assert heard.outputs[choice] == answers(prompt)[choice][: len(heard.outputs[choice])]
        self.cancel(key, [])

    async def follow(self, name: str, prompt: tuple[int, ...], choice: int, heard: Heard) -> None:
        """One choice from attempt to attempt."""
        delivered: list[int] = []
        for preemptions in range(40):
            await heard.over[choice].wait()
            delivered += heard.outputs[choice]
            assert delivered == answers(prompt)[choice][: len(delivered)]
            self.outcomes[heard.words[choice][0]] += 1
            if heard.words[choice][0] == "decode finished":
                assert delivered == answers(prompt)[choice]
                return
            assert heard.words[choice][0] == "decode preempted"
            heard, _ = self.start(
                name,
                prompt,
                delivered=delivered,
                choices=[choice],
                sampling=SAMPLED,
                reserve=preemptions >= 1,
            )
        raise AssertionError(f"choice {choice} of {name} was preempted again and again")

    async def beams(self, name: str) -> None:
        prompt, width = self.rng.choice(PROMPTS), self.rng.randint(1, 4)
        ranks = list(range(self.rng.randint(1, width)))
        cancelled = self.rng.random() < 0.2
        for preemptions in range(40):
            reserve = preemptions >= 2
            heard, key = self.start(
                name, prompt, choices=ranks, sampling={"beam_width": width}, reserve=reserve
            )
            if cancelled:
                await asyncio.sleep(self.rng.expovariate(100))
                self.cancel(key, self.rng.choice([[], ranks]))
                self.outcomes["beams cancelled"] += 1
                return
            await heard.ended.wait()
            (word,) = {words[0] for words in heard.words.values()}
            self.outcomes[f"beams: {word}"] += 1
            if word == "decode finished":
                assert [heard.outputs[rank] for rank in ranks] == beams(prompt, width)[: len(ranks)]
                return
            assert word == "decode preempted"
            assert not any(heard.outputs.values())
        raise AssertionError(f"the beams of {name} were preempted again and again")


@pytest.mark.parametrize(
    ("transport", "blocks"), [("shared_memory", 20), pytest.param("tcp", 24, marks=pytest.mark.full)]
)
async def test_250_requests_leave_every_block_free(
    transport: str, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with house(transport, prefills=2, blocks=blocks) as made:
        walk = Walk(made, blocks)
        await walk.run()
        assert await made.empty() == []
        assert made.decodes[0].pool.quarantined() == 0
        made.decodes[0].loop.flush_prefix_cache()
        assert made.decodes[0].pool.free() == blocks
        await walk.gateway.close()
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 200, walk.outcomes
    assert walk.outcomes["decode preempted"] > 10, walk.outcomes
    assert walk.outcomes["choice cancelled"] > 30, walk.outcomes
    assert walk.outcomes["beams: decode finished"] > 30, walk.outcomes
    assert walk.outcomes["beams: decode preempted"] > 0, walk.outcomes
