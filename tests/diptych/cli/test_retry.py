"""`diptych generate` at a server that refuses for now: it says for how long it waits."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from diptych.cli.generate_command import Question, ask
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.client.served import served

Code = grpc.StatusCode


class Refusing(rpc.InferenceServiceServicer):
    """Refuses so many calls with a hint, if it has one, and answers the others."""

    def __init__(self) -> None:
        self.code, self.refusals, self.calls = Code.RESOURCE_EXHAUSTED, 1, 0
        self.hint: str | None = "300"

    def _refuse(self, context: grpc.ServicerContext) -> None:
        self.calls += 1
        if self.calls <= self.refusals:
            if self.hint is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", self.hint),))
            context.abort(self.code, "not now")

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._refuse(context)
        return pb.GenerateResponse(request_id="r1", model="small", outputs=[pb.OutputDelta(text="done")])

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self._refuse(context)
        for text in ("do", "ne"):
            yield pb.GenerateResponse(request_id="r1", model="small", outputs=[pb.OutputDelta(text=text)])


@pytest.fixture
def server() -> Iterator[tuple[Refusing, str]]:
    service = Refusing()
    with served(service, calls=2) as address:
        yield service, address


def asked(address: str, *, stream: bool = False, timeout_s: float | None = None) -> int:
    question = Question("hello", raw=True, system=None, model="small", timeout_s=timeout_s, options={})
    return ask(address, question, stream=stream, timings=False)


@pytest.mark.parametrize("stream", [False, True])
def test_call_with_retries_announces_a_wait(
    server: tuple[Refusing, str], stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(server[1], stream=stream) == 0
    shown = capsys.readouterr()
    assert shown.out == "done\n"
    [line] = shown.err.splitlines()
    assert line.endswith("RESOURCE_EXHAUSTED: not now; waiting 0.3 s, as the server asked")


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED])
def test_call_with_retries_repeats_while_a_server_is_replaced(
    server: tuple[Refusing, str], code: grpc.StatusCode, capsys: pytest.CaptureFixture[str]
) -> None:
    server[0].code, server[0].hint = code, None
    assert asked(server[1]) == 0
    assert capsys.readouterr() == ("done\n", "")


@pytest.mark.parametrize(
    ("code", "hint"), [(Code.RESOURCE_EXHAUSTED, None), (Code.INVALID_ARGUMENT, None), (Code.INTERNAL, "1")]
)
def test_call_with_retries_raises_what_would_fail_again(
    server: tuple[Refusing, str], code: grpc.StatusCode, hint: str | None
) -> None:
    server[0].code, server[0].hint = code, hint
    assert asked(server[1]) == 1
    assert server[0].calls == 1


def test_call_with_retries_waits_for_nothing_after_the_deadline(
    server: tuple[Refusing, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server[0].hint = "30000"
    assert asked(server[1], timeout_s=20.0) == 1
    assert server[0].calls == 1
    assert "waiting" not in capsys.readouterr().err


def test_call_with_retries_gives_up_after_as_many_attempts_as_a_client(server: tuple[Refusing, str]) -> None:
    server[0].refusals, server[0].hint = 10, "1"
    assert asked(server[1]) == 1
    assert server[0].calls == 4
