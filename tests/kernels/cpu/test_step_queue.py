"""Native steps that are launched ahead: the tokens of steps one after the other, whatever their threads."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native import rotations
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import AbortWords, Launched, SequenceStep
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

GREEDY = SampleRow(SamplingParams(temperature=0.0), (), ())
WARM = SampleRow(SamplingParams(temperature=0.8), (), ())
SHAPE = shape_of()
LAYOUT = layout_of(SHAPE, 16, torch.float32)
PROMPTS = [5, 15, 16, 30]


def backend_of(threads: int = 1) -> NativeBackend:
    made = NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)
    made.set_threads(threads)
    return made


class Streams:
    """Prompts that were computed, and what was said after them."""

    def __init__(self, backend: NativeBackend, tokens: int = 60) -> None:
        pool = Pool(LAYOUT, len(PROMPTS) * LAYOUT.blocks_for(tokens))
        self.sequences = [pool.sequence(tokens) for _ in PROMPTS]
        for sequence, length in zip(self.sequences, PROMPTS, strict=True):
            backend.forward([sequence.step(tokens_of(length, seed=length))], None)
        self.outputs = [[7], [8], [9], [10]]

    def steps(self, members: Sequence[int], before: Sequence[int] = ()) -> list[SequenceStep]:
        """The next step of these, which follow their rows of the step `before`."""
        steps = [self.sequences[m].step(self.outputs[m][-1:]) for m in members]
        return [
            replace(step, follows=before.index(m) if m in before else None)
            for m, step in zip(members, steps, strict=True)
        ]

    def say(self, members: Sequence[int], tokens: Sequence[object]) -> None:
        for member, token in zip(members, tokens, strict=True):
            assert isinstance(token, Sampled)
            self.outputs[member].append(token.token_id)


@pytest.mark.parametrize("threads", [1, 3])
def test_launched_ahead_the_tokens_are_those_of_steps_one_by_one(threads: int) -> None:
    """Streams come, go, and change their rows from step to step."""
    chooser = random.Random(threads)
    batches = [chooser.sample(range(4), chooser.randint(1, 4)) for _ in range(25)]
    plain, ahead = backend_of(), backend_of(threads)
    expected, said = Streams(plain), Streams(ahead)
    for members in batches:
        drawn = plain.forward_and_sample(expected.steps(members), [GREEDY] * len(members), None)
        expected.say(members, drawn.tokens)
    launched: Launched | None = None
    before: list[int] = []
    for members in [*batches, []]:
        following = None
        if members:
            following = ahead.launch(said.steps(members, before), [GREEDY] * len(members), None)
            assert following is not None
        if launched is not None:
            said.say(before, launched.collect().tokens)
        launched, before = following, members
    assert said.outputs == expected.outputs
    assert max(map(len, said.outputs)) > 10


def test_rows_that_have_to_be_looked_at_are_not_launched() -> None:
    backend = backend_of()
    steps = Streams(backend).steps([0, 1])
    assert backend.samples_on_device(GREEDY)
    assert not backend.samples_on_device(WARM)
    assert backend.launch(steps, [GREEDY, WARM], None) is None
    assert backend.launch(steps, [GREEDY, None], None) is None


def test_two_steps_at_most_and_each_collected_once_in_order() -> None:
    backend = backend_of()
    streams = Streams(backend)
    one, two = (backend.launch(streams.steps([0]), [GREEDY], None) for _ in range(2))
    assert one is not None
    assert two is not None
    with pytest.raises(NativeError, match="two steps"):
        backend.launch(streams.steps([0]), [GREEDY], None)
    with pytest.raises(NativeError, match="another step"):
        backend.forward(streams.steps([0]), None)
    with pytest.raises(RuntimeError, match="order"):
        two.collect()
    one.collect()
    two.collect()
    with pytest.raises(RuntimeError, match="once"):
        two.collect()
    assert backend.forward(streams.steps([1]), None).isfinite().all()


def test_a_row_that_is_not_there_is_not_followed() -> None:
    backend = backend_of()
    streams = Streams(backend)
    steps, other = streams.steps([0, 1]), streams.steps([2])[0]
    expected = backend.forward_and_sample(steps, [GREEDY] * 2, None)
    launched = backend.launch(steps, [GREEDY] * 2, None)
    assert launched is not None
    for row in (-2, 2, 1000):
        with pytest.raises(NativeError, match="not there"):
            backend.launch([replace(other, follows=row)], [GREEDY], None)
    with pytest.raises(NativeError, match="chunk"):
        backend.launch([replace(streams.sequences[3].step([1, 2]), follows=1)], [GREEDY], None)
    assert launched.collect().tokens == expected.tokens


@pytest.fixture
def short_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary tables that a context of some length outgrows."""
    monkeypatch.setattr(rotations, "FIRST_POSITIONS", 64)


@pytest.mark.usefixtures("short_tables")
def test_a_launch_makes_no_tables() -> None:
    """For long contexts that takes a tenth of a second, on the event loop; and a running step reads what is
    there. Steps that are not launched make them, and those that follow are launched again.
    """
    backend = backend_of()
    streams, far = Streams(backend), Pool(LAYOUT, 300).sequence(4000)
    launched = backend.launch(streams.steps([0]), [GREEDY], None)
    assert launched is not None
    beyond = replace(far.step([1]), start=3999)
    assert backend.launch([beyond], [GREEDY], None) is None
    launched.collect()
    assert backend.launch([beyond], [GREEDY], None) is None
    backend.forward_and_sample([beyond], [GREEDY], None)
    again = backend.launch([beyond], [GREEDY], None)
    assert again is not None
    again.collect()


@pytest.mark.usefixtures("short_tables")
def test_a_step_beside_a_launched_one_is_refused_before_it_replaces_the_tables() -> None:
    backend = backend_of()
    step, far = Streams(backend).steps([0]), Pool(LAYOUT, 300).sequence(4000)
    expected = backend.forward_and_sample(step, [GREEDY], None).tokens
    table = weakref.ref(backend._rotations.tables[0][0])
    launched = backend.launch(step, [GREEDY], None)
    assert launched is not None
    with pytest.raises(NativeError, match="running"):
        backend.forward([replace(far.step([1]), start=3999)], None)
    assert table() is not None
    assert launched.collect().tokens == expected
    backend.forward([replace(far.step([1]), start=3999)], None)


def test_an_aborted_step_ends_and_the_next_one_follows() -> None:
    backend = backend_of()
    streams = Streams(backend)
    words = AbortWords(1)
    words.abort(0)
    one = backend.launch(streams.steps([0]), [GREEDY], words)
    two = backend.launch(streams.steps([1, 0], [0]), [GREEDY] * 2, None)
    assert one is not None
    assert two is not None
    assert not isinstance(one.collect().tokens[0], Sampled)
    expected = (
        backend.forward_and_sample(streams.steps([1]), [GREEDY], None).tokens if two.collect() else None
    )
    assert expected is not None
    assert isinstance(expected[0], Sampled)


def test_a_model_ends_after_the_steps_that_were_launched() -> None:
    """Nobody collects them; the thread writes into memory that must be there until it is through."""
    shape = shape_of(num_layers=60, hidden_size=200)
    weights = weights_of(shape, torch.float32)
    for delay in (0.0, 0.0005, 0.002, 0.01):
        backend = NativeBackend(shape, weights, torch.float32)
        sequence = Pool(layout_of(shape, 16, torch.float32), 40).sequence(512)
        for tokens in (tokens_of(200), [3]):
            assert backend.launch([sequence.step(tokens)], [GREEDY], None) is not None
        time.sleep(delay)
        del backend, sequence
