"""No token is lost or repeated when workers die: answers equal those of a run without faults."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.faults.armory import kill
from tests.faults.asks import ASKS, ask, check_same, retries
from tests.faults.conftest import Breakable


def test_every_way_of_generating_survives_the_death_of_the_only_decode_worker(laptop: Breakable) -> None:
    """All at once on one worker, which dies in the middle; they wait for the next one and go on."""
    expected = ask(laptop.address, ASKS)
    laptop.armory.arm("decode.step", "crash", after=12)
    answers = ask(laptop.address, ASKS)
    assert laptop.armory.taken("decode.step")
    check_same(expected, answers)
    assert all(retries([answer]) for answer in answers.values())
    laptop.stack.wait_idle(20)


def test_a_prefill_worker_that_is_killed_between_two_chunks_is_made_up_for(laptop: Breakable) -> None:
    laptop.armory.arm("prefill.chunk", "freeze", after=2)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, laptop.address, ASKS, length=130)  # of which nothing is cached
        kill(laptop.armory.wait_taken("prefill.chunk"))
        answers = asked.result()
    assert retries(answers.values())
    check_same(ask(laptop.address, ASKS, length=130), answers)
    laptop.stack.wait_idle(20)
