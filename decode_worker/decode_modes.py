"""Which kind of gang decodes an attempt."""

from __future__ import annotations

from decode_worker.beams import Beams
from decode_worker.choices import Choice
from decode_worker.request import DecodeRequest
from decode_worker.step_group import StepGroup


def gangs_of(request: DecodeRequest, joined: int) -> list[StepGroup]:
    """The gangs of an attempt, at least one; their ages count up from `joined`."""
    choices = request.attempt.choices
    if request.attempt.beam_width:
        return [Beams(request, joined, list(choices))]
    return [Choice(request, joined + place, choice, place) for place, choice in enumerate(choices)]
