"""Room of recurrent layers: as many bytes as are planned, and fewer tokens have their own part of it."""

from __future__ import annotations

import torch

from diptych.engine.backends.triton.recurrent.mixer_room import MixerRoom, room_bytes

NUMBERS = (5, 3)


def room(tokens: int) -> MixerRoom:
    return MixerRoom.make(NUMBERS, tokens, torch.bfloat16, torch.device("cpu"))


def test_bytes_are_those_of_the_room() -> None:
    for tokens in (1, 33):
        made = room(tokens)
        assert room_bytes(NUMBERS, tokens, torch.bfloat16) == made.plain.nbytes + made.wide.nbytes


def test_fewer_tokens_clear_their_own_room_alone() -> None:
    whole = room(8)
    for every in (*whole.typed(5), *whole.floats(3)):
        every.fill_(7)
    few = whole.rows(2)
    parts = few.typed(2, 3) + few.floats(3)
    assert [tuple(part.shape) for part in parts] == [(2, 2), (2, 3), (2, 3)]
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.flatten().tolist()) for part in parts] == [{0}, {1}, {2}], "none is within another"
    few.clear()
    for held, numbers in ((whole.plain, 5), (whole.wide, 3)):
        assert held.flatten().tolist() == [0] * 2 * numbers + [7] * 6 * numbers
