"""Clients whose HTTP/2 window stays at 64 KiB and that stop reading, and workers with much output."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from diptych.worker.v1 import decode_pb2, work_pb2
from tests.gateway.running_gateway import Stack
from tests.gateway.scripted_workers import Script, ScriptedDecode

FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
LOGPROBS = 20
WORDY = 400  # tokens of a choice: with 20 alternatives each about half a megabyte of messages
TOP = [work_pb2.Alternative(token_id=token, logprob=-1.0) for token in range(100, 100 + LOGPROBS)]
SCORE = work_pb2.Score(logprob=-0.5, rank=1, top=TOP)


def fixed_window(stack: Stack) -> grpc.aio.Channel:
    """Return a channel whose streams take 64 KiB ahead of their readers."""
    options = [*FIXED_WINDOW, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}", options=options)


def wordy(stack: Stack, n: int = 1, **fields: Any) -> pb.GenerateRequest:
    return stack.request(
        sampling=pb.SamplingParams(n=n, seed=1),
        stopping=pb.StoppingCriteria(max_tokens=WORDY),
        response=pb.ResponseOptions(logprobs=LOGPROBS),
        **fields,
    )


async def stopped_reader(channel: grpc.aio.Channel, request: pb.GenerateRequest, **options: Any) -> Any:
    """Begin a stream, read its first message and no other one."""
    call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request, **options)
    await call.read()
    return call


def talking(tokens: int = WORDY, *, finish: bool = True, pause_s: float = 0.0, per_step: int = 20) -> Script:
    """Return the script of a worker that sends ``tokens`` tokens with their alternatives for every choice."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        for index in range(0, tokens, per_step):
            count = min(per_step, tokens - index)
            scores = [SCORE] * count if work.sampling.HasField("logprobs") else []
            worker.say(
                step=decode_pb2.StepBatch(
                    tokens=[
                        work_pb2.Tokens(
                            id=work.id, index=index, token_ids=[500] * count, choice=choice, scores=scores
                        )
                        for choice in work.choices
                    ]
                )
            )
            await asyncio.sleep(pause_s)
        if finish:
            for choice in work.choices:
                worker.ended(work, finished=work_pb2.FINISH_REASON_LENGTH, choice=choice)

    return script
