"""The buffered outputs of a beam search: the real gateway, scripted workers."""

from __future__ import annotations

from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import collect, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, delivered

ANSWERS = ["Paris, of course.", "It is Paris 😀!"]


async def test_beam_search_interrupted_between_two_pieces_restarts_and_repeats_no_output(
    bundled: ServedModel, redis_url: str
) -> None:
    best = [bundled.tokenizer.encode(answer) for answer in ANSWERS]
    half = len(best[1]) // 2

    def send(worker: ScriptedDecode, work: work_pb2.Work, rank: int, start: int, end: int) -> None:
        worker.tokens(work, start, best[rank][start:end], choice=rank)
        if end == len(best[rank]):
            worker.ended(work, finished=work_pb2.FINISH_REASON_LENGTH, choice=rank)

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        asked.append((delivered(work), list(work.choices)))
        for rank in work.choices:
            send(worker, work, rank, 0, half)
            if len(asked) == 1 and rank == 1:
                failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING)
                worker.ended(work, failure=failure, choice=rank)
                return
            send(worker, work, rank, half, len(best[rank]))

    asked: list[tuple[int, list[int]]] = []
    workers = ScriptedPrefill(), ScriptedDecode(script), ScriptedDecode(script)
    async with running(bundled, redis_url, *workers) as stack:
        request = stack.request(sampling=pb.SamplingParams(n=2, beam_width=2))
        messages = await collect(stack.stub.StreamGenerate(request))
        await stack.until_idle()
    assert asked == [(0, [0, 1]), (0, [1])]
    outputs = [output for message in messages for output in message.outputs]
    for rank, answer in enumerate(ANSWERS):
        assert "".join(output.text for output in outputs if output.index == rank) == answer
    assert messages[-1].usage.completion_tokens == sum(map(len, best))
