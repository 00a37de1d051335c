"""What the client takes and gives: prompts, options and results as plain Python values, no protobuf.

Times are in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from diptych.v1 import inference_pb2 as pb

Message = Mapping[str, str]
"""One turn of a conversation: {"role": "user", "content": "…"}."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text to be continued as it is, token ids, or the turns of a chat (the server applies the template)."""


class Options(TypedDict, total=False):
    """What a caller may set; an absent key means the model's own default, 0 is a real 0."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    priority: int
    session_id: str
    request_id: str
    cache_salt: str


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached_prompt_tokens` of the prompt's were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went."""

    queue: float
    prefill: float
    kv_transfer: float
    decode_queue: float
    decode: float
    time_to_first_token: float
    total: float
    kv_bytes_transferred: int
    preemptions: int
    retries: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. `finish_reason`, `usage` and `timings` come with the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `finish_reason` is "stop", "length", "time_limit", …"""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None


_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "seed", *_PENALTIES))
_STOPPING = frozenset(["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"])
_REQUEST = frozenset(["priority", "session_id", "request_id"])


def build_request(prompt: Prompt, model: str, options: Options) -> pb.GenerateRequest:
    """The request for a prompt. Raises TypeError for an option that does not exist."""
    given: dict[str, Any] = dict(options)
    unknown = given.keys() - _SAMPLING - _STOPPING - _REQUEST - {"cache_salt"}
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(
        model=model,
        sampling=pb.SamplingParams(**_only(given, _SAMPLING)),
        stopping=pb.StoppingCriteria(**_only(given, _STOPPING)),
        cache=pb.CacheOptions(salt=options.get("cache_salt", "")),
        **_only(given, _REQUEST),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        turns: list[Any] = list(prompt)
        request.chat.messages.extend(pb.ChatMessage(**turn) for turn in turns)
    else:
        ids: list[Any] = list(prompt)
        request.token_ids.ids.extend(ids)
        request.token_ids.SetInParent()  # an empty prompt is the server's to refuse
    return request


def read_chunk(response: pb.GenerateResponse) -> Chunk:
    """The first choice of a response, which is all that this client asks for."""
    outputs = [output for output in response.outputs if output.index == 0]
    reasons = [output.finish_reason for output in outputs if output.finish_reason]
    return Chunk(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=_reason(reasons[-1]) if reasons else None,
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timings=_timings(response.timings) if response.HasField("timings") else None,
    )


def read_completion(response: pb.GenerateResponse) -> Completion:
    """The answer of the unary call."""
    chunk = read_chunk(response)
    return Completion(
        response.request_id, chunk.text, chunk.token_ids, chunk.finish_reason, chunk.usage, chunk.timings
    )


def _only(given: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _reason(reason: pb.FinishReason) -> str:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


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
    )
