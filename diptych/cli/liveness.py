"""Notices a process that has stopped answering.

One that is stopped, deadlocked or stuck keeps its ports open and never ends by itself: its work goes
elsewhere, but what it could do is missing until somebody ends it. Silence is counted in questions, so that a
pause of this process is one unanswered question at most.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """By default some forty seconds, with five for each answer: a starved machine makes everybody slow."""

    every_s: float = 5.0
    questions: int = 4  # without an answer, one after the other


async def silence(answers: Callable[[], Awaitable[bool]], patience: Patience) -> None:
    """Returns when too many questions in a row had no answer.

    Args:
        answers: asks once; has a time limit of its own.
    """
    missed = 0
    while missed < patience.questions:
        await asyncio.sleep(patience.every_s)
        missed = 0 if await answers() else missed + 1
