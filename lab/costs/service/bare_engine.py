"""The bare engine in a process of its own: a round for every line on standard input, its seconds as answer.

python -m lab.costs.service.bare_engine MODEL DTYPE THREADS CLIENTS INPUT OUTPUT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from diptych.bench.datasets.synthetic import RandomLengths
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from diptych.runtime.settings import resolve_model
from lab.precisions import PRECISIONS, load_precision

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


class BareEngine:
    """`clients` prompts of `input_len` tokens, one step each, then steps of all until `output_len`."""

    def __init__(self, runner: Runner, clients: int, input_len: int, output_len: int) -> None:
        self._runner = runner
        self._lengths = RandomLengths(input_len, output_len)
        self._clients, self._input_len, self._output_len = clients, input_len, output_len
        layout = runner.model.kv_layout(BLOCK_SIZE)
        each = layout.blocks_for(input_len + output_len)
        self._memory = KVMemory(layout, clients * each)
        self._tables = [list(range(row * each, (row + 1) * each)) for row in range(clients)]

    def outputs(self, seed: int) -> list[list[int]]:
        """Return the greedy outputs for the prompts of `seed`: `output_len` tokens each."""
        prompts = [request.prompt for request in self._lengths.requests(self._clients, seed)]
        outputs = [
            self._drawn([self._step(row, 0, [*prompt])])  # a prompt is token ids here
            for row, prompt in enumerate(prompts)
        ]
        for position in range(self._input_len, self._input_len + self._output_len - 1):
            steps = [self._step(row, position, output[-1:]) for row, output in enumerate(outputs)]
            for output, token in zip(outputs, self._drawn(steps), strict=True):
                output.append(token)
        return outputs

    def _step(self, row: int, start: int, token_ids: Sequence[int]) -> SequenceStep:
        return SequenceStep(self._memory, self._tables[row], start, token_ids, wants_logits=True)

    def _drawn(self, steps: Sequence[SequenceStep]) -> list[int]:
        draws = [SampleRow(GREEDY, (), ()) for _ in steps]
        drawn = self._runner.step_and_sample(steps, draws)
        if not any(token is not None for token in drawn.tokens):
            return [int(token) for token in drawn.logits.argmax(1)]
        return [token.token_id for token in drawn.tokens if isinstance(token, Sampled)]


def main(argv: Sequence[str]) -> int:
    model, name, *sizes = argv
    dtype = next(precision for precision in PRECISIONS if precision == name)
    threads, clients, input_len, output_len = map(int, sizes)
    runner = Runner(load_precision(resolve_model(model), dtype), threads)
    engine = BareEngine(runner, clients, input_len, output_len)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        engine.outputs(int(line))
        print(time.perf_counter() - began, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
