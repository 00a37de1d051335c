"""``finish_reason`` and ``stop_reason``: why a choice ended, in OpenAI's words and vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.v1 import inference_pb2 as pb
from tests.gateway.frontends.openai.test_answers import chat, completion, events, message, sent, whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [chat, completion])
async def test_what_stopped_it_is_named_if_the_client_named_it(kind: Any, stream: bool) -> None:
    """Else an end of sequence could not be told from a stop that the client asked for."""
    for named, end, reason in (
        ([], {"stop_token_id": 2}, None),
        ([7], {"stop_token_id": 2}, None),
        ([7, 2], {"stop_token_id": 2}, 2),
        ([0], {"stop_token_id": 0}, 0),
        ([2], {"stop_text": "."}, "."),
        ([2], {}, None),
    ):
        answer = kind(stream=stream, stop_token_ids=named)
        output = pb.OutputDelta(finish_reason=pb.FINISH_REASON_STOP, **end)
        last = message(output, prompt=pb.PromptInfo())
        answer.begin("r")
        made = events(await sent(answer, 0, last))[-1] if stream else await whole(answer, [last])
        (choice,) = made["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
