"""A model that knows nothing, held to random JSON schemas: whatever it writes is what they ask for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from diptych.engine.batch import SequenceStep
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from diptych.runtime.grammar.grammar import BadGrammar
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import Grammars
from tests.diptych.worker_process.random_schemas import schema
from tests.end_to_end import tiny_model

SEED = 20261121
MAX_TOKENS = 480


class Writer:
    """A small random model that writes under grammars."""

    def __init__(self, folder: Path) -> None:
        self._runner, self._memory, _ = tiny_model.aggregated(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.grammars = Grammars(folder)

    def write(self, text: str, seed: int) -> str | None:
        """What comes under the schema; None if tokens run out before it is complete."""
        state = self.grammars.start_now(work_pb2.Grammar(kind=work_pb2.Grammar.KIND_JSON_SCHEMA, text=text))
        params = SamplingParams(temperature=1.0, seed=seed)
        prompt, output = [seed % 300], list[int]()
        new, start = list(prompt), 0
        while len(output) < MAX_TOKENS and not state.complete:
            logits = self._step(new, start)
            start += len(new)
            (sampled,) = sample(logits, [SampleRow(params, prompt, output, mask=state)])
            assert isinstance(sampled, Sampled), (text, self.tokenizer.decode(output, skip_special=True))
            if sampled.token_id in self.tokenizer.eos_token_ids:
                break
            state.accept(sampled.token_id)
            output.append(sampled.token_id)
            new = [sampled.token_id]
        else:
            if not state.complete:
                return None
        return self.tokenizer.decode(output, skip_special=True)

    def _step(self, new: list[int], start: int) -> np.ndarray:  # type: ignore[type-arg]
        table = list(range(self._memory.num_blocks))
        return self._runner.step([SequenceStep(self._memory, table, start, new, wants_logits=True)])  # type: ignore[return-value]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    return Writer(tiny_model.write(tmp_path_factory.mktemp("writer")))


def hold_to_schemas(writer: Writer, count: int) -> None:
    complete = impossible = 0
    seed = SEED
    while complete < count:
        seed += 1
        wanted = schema(seed)
        try:
            written = writer.write(json.dumps(wanted), seed)
        except BadGrammar as error:  # of a string with a pattern that its length excludes, say
            if "nothing can satisfy" not in str(error):
                raise
            impossible += 1
            continue
        if written is None:
            continue
        complete += 1
        value = json.loads(written)
        faults = list(
            Draft202012Validator(wanted, format_checker=Draft202012Validator.FORMAT_CHECKER).iter_errors(
                value
            )
        )
        assert not faults, (wanted, written, faults)
    tried = seed - SEED
    assert impossible < tried / 20
    assert tried - impossible - complete < tried / 20, "too many ran out of tokens to prove anything"


def test_random_outputs_match_their_schema(writer: Writer) -> None:
    hold_to_schemas(writer, 60)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_random_outputs_match_a_thousand_schemas(writer: Writer) -> None:
    hold_to_schemas(writer, 1000)
