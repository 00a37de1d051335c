"""Reasoning and the grammar after it, when the decode worker dies within the one or the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import reasoning_model
from tests.end_to_end.reasoning_model import Asker, joined
from tests.faults.conftest import Breakable, breakable

REGEX = r"[a-f]{4} [0-9]{12}"
TIMEOUT_S = 600
IDLE_S = 300.0


@dataclass(frozen=True)
class System:
    """A system whose model reasons."""

    breakable: Breakable
    stub: rpc.InferenceServiceStub
    asker: Asker


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = reasoning_model.write(tmp_path_factory.mktemp("reasoning"))
    for started in breakable(tmp_path_factory, folder, "--prefill-workers", "1", "--decode-workers", "2"):
        with grpc.insecure_channel(started.address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            yield System(started, stub, Asker(folder, stub, TIMEOUT_S))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("within", ["reasoning", pytest.param("answer", marks=pytest.mark.full)])
@pytest.mark.parametrize("choices", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_stream_is_the_undisturbed_one_wherever_its_worker_dies(
    system: System, within: str, choices: int
) -> None:
    request = system.asker.reasoning_request(least=14, structured_output={"regex": REGEX})
    request.sampling.n = choices
    request.stopping.max_tokens = 300
    expected = system.stub.Generate(request, timeout=TIMEOUT_S)
    reasoning = len(system.asker.split(expected.outputs[0].token_ids).reasoning)
    system.breakable.stack.wait_idle(IDLE_S)
    steps = 6 if within == "reasoning" else reasoning + 6
    system.breakable.armory.arm("decode.step", "crash", after=steps)
    messages = list(system.stub.StreamGenerate(request, timeout=TIMEOUT_S))
    assert system.breakable.armory.taken("decode.step")
    answer = joined(messages)
    assert answer.timings.retries >= 1
    assert answer.usage.reasoning_tokens == expected.usage.reasoning_tokens
    for one, other in zip(answer.outputs, expected.outputs, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert (one.reasoning_content, one.text) == (other.reasoning_content, other.text)
        assert re.fullmatch(REGEX, one.text)
        assert one.finish_reason == pb.FINISH_REASON_STOP
    system.breakable.stack.wait_idle(IDLE_S)
