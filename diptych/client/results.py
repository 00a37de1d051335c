"""Results as plain Python values: answers, their pieces, and the times of their phases.

Times are in seconds.
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached_prompt_tokens` of the prompt's were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens that speculative decoding drafted and checked."""
    accepted_draft_tokens: int = 0
    """Drafted tokens that were right."""


@dataclass(frozen=True)
class Timings:
    """Times of the phases of a request."""

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
    local_prefill: bool = False
    """True if the decode worker computed the prompt itself, in one attempt at least."""
    tier_blocks: int = 0
    """KV blocks of the prompt that came from a worker's tiers."""
    kv_load: float = 0.0
    """Seconds that the request waited for them, in `queue`."""
    encode: float = 0.0
    """Seconds that its prompt waited for rows of its images; neither in `queue` nor in `prefill`."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability in the model's own distribution.

    `logprob` and `rank` (1 = the likeliest) are None for a prompt's first token. `utf8` holds the bytes of a
    token that is not whole text. `top` are the likeliest tokens at this place, where they were asked for.
    """

    token_id: int
    text: str
    utf8: bytes
    logprob: float | None
    rank: int | None
    top: tuple["TokenLogprob", ...]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    name: str
    arguments_json: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Parse the arguments. Raises ValueError where the model wrote something else than a JSON object."""
        found = json.loads(self.arguments_json)
        if not isinstance(found, dict):
            raise ValueError("the arguments are not an object")
        return found


@dataclass(frozen=True)
class Choice:
    """Choice: one of the `n` answers, or what is new of it.

    `finish_reason` is "stop", "length", "time_limit", "tool_calls", …, None while it goes on. One of
    `stop_text` and `stop_token_id` says which stop ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    stop_text: str | None = None
    stop_token_id: int | None = None
    reasoning_content: str = ""  # written before `text`, by models that mark it


@dataclass(frozen=True)
class PromptInfo:
    """Prompt as the model had it. Ids and scores are there where they were asked for."""

    token_count: int
    cached_token_count: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class _Answer:
    """Base of pieces and whole answers: choices, and the first one's fields at hand."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    prompt: PromptInfo | None
    usage: Usage | None
    timings: Timings | None
    model_digest: str = ""

    @property
    def first(self) -> Choice:
        """Choice 0; empty where there is nothing of it."""
        return next((choice for choice in self.choices if choice.index == 0), Choice(0))

    @property
    def text(self) -> str:
        return self.first.text

    @property
    def reasoning_content(self) -> str:
        return self.first.reasoning_content

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.first.token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.first.finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.first.logprobs

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.first.tool_calls


@dataclass(frozen=True)
class Chunk(_Answer):
    """A piece of a stream: what is new of each choice.

    `request_id`, `model`, its digest and `prompt` come with the first one, `usage` and `timings` with the
    last.
    """

    resume_token: str = ""


@dataclass(frozen=True)
class Completion(_Answer):
    """A whole answer; of a stream that broke, what came of it. `choices` are in order."""


@dataclass(frozen=True)
class Tokens:
    """Text or chat as the model has it. `tokens` and `offsets` are empty unless asked for."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    max_context_length: int


@dataclass(frozen=True)
class Model:
    """A served model, and the largest values that its server takes."""

    name: str
    aliases: tuple[str, ...]
    max_context_length: int | None
    max_output_tokens: int | None
    vocab_size: int | None
    eos_token_ids: tuple[int, ...]
    max_n: int | None
    max_logprobs: int | None
    structured_outputs: tuple[str, ...]
    chat: bool
    tokenizer_digest: str
    digest: str = ""
    """Version of its files: another content under the same name has another one."""
