"""The server's messages → what a caller gets, and the pieces of a stream put together."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from diptych.client.results import (
    Choice,
    Chunk,
    Completion,
    Model,
    PromptInfo,
    Timings,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
)
from diptych.v1 import inference_pb2 as pb


class Received:
    """Output of a stream so far. It stays when the stream breaks.

    `resume_token` is what the server gave to continue a broken stream with, "" if it gave none.
    """

    def __init__(self) -> None:
        self._choices: dict[int, list[Choice]] = {}
        self._head: Chunk | None = None
        self._last: Chunk | None = None
        self.resume_token = ""

    @property
    def begun(self) -> bool:
        """True once any message came."""
        return self._head is not None

    @property
    def has_output(self) -> bool:
        """True once a piece of any choice came: a first message may be about the prompt alone."""
        return bool(self._choices)

    @property
    def finished(self) -> bool:
        """True once the message that ends a stream came."""
        return self._last is not None and self._last.usage is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return tuple(token for piece in self._choices.get(0, ()) for token in piece.token_ids)

    def add(self, chunk: Chunk) -> None:
        self._head = self._head or chunk
        self._last = chunk
        self.resume_token = chunk.resume_token or self.resume_token
        for choice in chunk.choices:
            self._choices.setdefault(choice.index, []).append(choice)

    def completion(self) -> Completion:
        head, last = self._head, self._last
        return Completion(
            request_id=head.request_id if head else "",
            model=head.model if head else "",
            choices=tuple(_joined(self._choices[index]) for index in sorted(self._choices)),
            prompt=head.prompt if head else None,
            usage=last.usage if last else None,
            timings=last.timings if last else None,
            model_digest=head.model_digest if head else "",
        )


def read_chunk(response: pb.GenerateResponse) -> Chunk:
    """Convert a message of a stream, or the only one of a whole answer."""
    return Chunk(
        request_id=response.request_id,
        model=response.model,
        choices=tuple(_choice(output) for output in response.outputs),
        prompt=_prompt(response.prompt) if response.HasField("prompt") else None,
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timings=_timings(response.timings) if response.HasField("timings") else None,
        model_digest=response.model_digest,
        resume_token=response.resume_token,
    )


def read_completion(response: pb.GenerateResponse) -> Completion:
    """Convert the answer of the unary call."""
    received = Received()
    received.add(read_chunk(response))
    return received.completion()


def read_tokens(response: pb.TokenizeResponse) -> Tokens:
    return Tokens(
        ids=tuple(response.token_ids),
        tokens=tuple(response.tokens),
        offsets=tuple((offset.start, offset.end) for offset in response.offsets),
        max_context_length=response.max_context_length,
    )


def read_models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(_model(model) for model in response.models)


def _joined(pieces: list[Choice]) -> Choice:
    """Join the pieces of one choice; the end is the last one's."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(score for piece in pieces for score in piece.logprobs),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        reasoning_content="".join(piece.reasoning_content for piece in pieces),
    )


def _choice(output: pb.OutputDelta) -> Choice:
    match = output.WhichOneof("stop_match")
    return Choice(
        index=output.index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=_scores(output.logprobs),
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in output.tool_calls),
        finish_reason=_reason(output.finish_reason) if output.finish_reason else None,
        stop_text=output.stop_text if match == "stop_text" else None,
        stop_token_id=output.stop_token_id if match == "stop_token_id" else None,
        reasoning_content=output.reasoning_content,
    )


def _scores(scores: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=score.token_id,
            text=score.text,
            utf8=score.utf8,
            logprob=score.logprob if score.HasField("logprob") else None,
            rank=score.rank if score.HasField("rank") else None,
            top=_scores(score.top),
        )
        for score in scores
    )


def _reason(reason: int) -> str:
    """Return a reason's name; a later server may have reasons that this client does not know."""
    names = pb.FinishReason.DESCRIPTOR.values_by_number
    return names[reason].name.removeprefix("FINISH_REASON_").lower() if reason in names else f"{reason}"


def _prompt(prompt: pb.PromptInfo) -> PromptInfo:
    ids, scores = tuple(prompt.token_ids), _scores(prompt.logprobs)
    return PromptInfo(prompt.token_count, prompt.cached_token_count, ids, scores)


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_prompt_tokens,
        usage.reasoning_tokens,
        usage.drafted_tokens,
        usage.accepted_draft_tokens,
    )


def _timings(timings: pb.Timings) -> Timings:
    def seconds(name: str) -> float:
        duration = getattr(timings, name)
        return float(duration.seconds + duration.nanos / 1e9)

    return Timings(
        queue=seconds("queue"),
        prefill=seconds("prefill"),
        kv_transfer=seconds("kv_transfer"),
        decode_queue=seconds("decode_queue"),
        decode=seconds("decode"),
        time_to_first_token=seconds("time_to_first_token"),
        total=seconds("total"),
        kv_bytes_transferred=timings.kv_bytes_transferred,
        preemptions=timings.preemptions,
        retries=timings.retries,
        local_prefill=timings.local_prefill,
        tier_blocks=timings.tier_blocks,
        kv_load=seconds("kv_load"),
        encode=seconds("encode"),
    )


def _model(model: pb.Model) -> Model:
    can = model.capabilities
    return Model(
        name=model.name,
        aliases=tuple(model.aliases),
        max_context_length=_given(model, "max_context_length"),
        max_output_tokens=_given(model, "max_output_tokens"),
        vocab_size=_given(model, "vocab_size"),
        eos_token_ids=tuple(model.eos_token_ids),
        max_n=_given(can, "max_n"),
        max_logprobs=_given(can, "max_logprobs"),
        structured_outputs=tuple(can.structured_outputs),
        chat=can.chat,
        tokenizer_digest=model.tokenizer_digest,
        digest=model.digest,
    )


def _given(message: Any, field: str) -> int | None:
    return int(getattr(message, field)) if message.HasField(field) else None
