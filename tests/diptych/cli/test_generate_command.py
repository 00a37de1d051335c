import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from rich.console import Console

from diptych.cli.generate_command import Question, ask, timing_table
from diptych.client import Timings, Usage
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.diptych.cli.specs import ROOT
from tests.diptych.client.served import served

SPENT = Timings(
    queue=0.001,
    prefill=0.0425,
    kv_transfer=0.0005,
    decode_queue=0.0,
    decode=0.5,
    time_to_first_token=0.05,
    total=0.56,
    kv_bytes_transferred=12345,
    preemptions=0,
    retries=0,
)


def rows(usage: Usage | None, spent: Timings = SPENT) -> dict[str, str]:
    out = StringIO()
    Console(file=out, width=200).print(timing_table(spent, usage))
    cells = [
        [cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines() if "│" in line
    ]
    return {cell[1]: " ".join(cell[2:4]).strip() for cell in cells}


def test_timing_table_shows_every_phase_in_milliseconds() -> None:
    shown = rows(Usage(prompt_tokens=40, completion_tokens=11, cached_prompt_tokens=32))
    assert shown["queue"] == "1.00"
    assert shown["prefill"] == "42.50 32 of 40 prompt tokens cached"
    assert shown["handoff"] == "0.50 12,345 bytes moved"
    assert shown["decode"] == "500.00 20.0 tokens/s"
    assert shown["first token after"] == "50.00"
    assert shown["total"] == "560.00"
    assert "retries" not in shown


def test_timing_table_of_a_retried_request_has_its_clients_pace() -> None:
    spent = replace(SPENT, retries=1, total=2.05)  # the last attempt decoded for half a second of it
    shown = rows(Usage(prompt_tokens=40, completion_tokens=101, cached_prompt_tokens=0), spent)
    assert shown["decode"] == "500.00 50.0 tokens/s"
    assert shown["retries"] == "1506.00 1: attempts that were lost, and waiting"


@pytest.mark.parametrize("usage", [None, Usage(prompt_tokens=4, completion_tokens=1, cached_prompt_tokens=0)])
def test_timing_table_has_no_pace_without_two_tokens(usage: Usage | None) -> None:
    assert rows(usage)["decode"] == "500.00"


class Fluent(rpc.InferenceServiceServicer):
    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id="r1", model="small", outputs=[pb.OutputDelta(text="Привет!")])


def test_a_terminal_without_its_letters_shows_an_answer_all_the_same() -> None:
    with served(Fluent(), calls=1) as address:
        done = subprocess.run(
            [sys.executable, "-m", "diptych", "generate", "hello", "--model", "small", "--address", address],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (0, "??????!\n"), done.stderr


class Breaking(rpc.InferenceServiceServicer):
    """Its streams end in the middle of an answer."""

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id="r1", model="small", outputs=[pb.OutputDelta(text="The cap")])
        context.abort(grpc.StatusCode.ABORTED, "it broke")


def test_generate_prints_an_error_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    question = Question("hello", raw=True, system=None, model="small", timeout_s=30, options={})
    with served(Breaking(), calls=1) as address:
        assert ask(address, question, stream=True, timings=False) == 1
    shown = capsys.readouterr()
    assert shown.out == "The cap\n"
    assert "it broke" in shown.err


class Reasoning(rpc.InferenceServiceServicer):
    """Answers with reasoning before the text."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        return pb.GenerateResponse(outputs=[pb.OutputDelta(reasoning_content="Hm [1]", text="Yes.")])

    def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        for reasoning, text in (("Hm", ""), (" [1]", ""), ("", ""), ("", "Yes"), ("", ".")):
            yield pb.GenerateResponse(outputs=[pb.OutputDelta(reasoning_content=reasoning, text=text)])


@pytest.mark.parametrize("stream", [True, False])
def test_generate_prints_reasoning_to_stderr(capsys: pytest.CaptureFixture[str], stream: bool) -> None:
    question = Question("hello", raw=False, system=None, model="small", timeout_s=30, options={})
    with served(Reasoning(), calls=1) as address:
        assert ask(address, question, stream=stream, timings=False) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Yes.\n", "Hm [1]\n")


class Refusing(rpc.InferenceServiceServicer):
    """Refuses every call as a gateway does a field, or as a port of another service does."""

    def __init__(self, *, known: bool) -> None:
        self.known = known

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        if not self.known:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field="sampling.top_p", description="must be above 0")
        details = status_pb2.Status(code=3, message="sampling.top_p: must be above 0")
        details.details.add().Pack(bad)
        context.set_trailing_metadata((("grpc-status-details-bin", details.SerializeToString()),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: must be above 0")
        raise AssertionError("unreachable: abort raises")


QUESTION = Question("hello", raw=True, system=None, model="small", timeout_s=30, options={})


def test_generate_says_once_which_field_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Refusing(known=True), calls=1) as address:
        assert ask(address, QUESTION, stream=False, timings=False) == 1
    assert capsys.readouterr().err.count("sampling.top_p: must be above 0") == 1


def test_generate_says_where_the_port_of_a_gateway_is(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Refusing(known=False), calls=1) as address:
        assert ask(address, QUESTION, stream=False, timings=False) == 1
    assert "A gateway's own port is 50051 by default" in capsys.readouterr().err


def test_generate_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:  # bound and not listening: calls are refused
        held.bind(("127.0.0.1", 0))
        assert ask(f"127.0.0.1:{held.getsockname()[1]}", QUESTION, stream=False, timings=False) == 1
    assert "`diptych up` starts one" in capsys.readouterr().err
