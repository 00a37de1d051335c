"""Table of the request parameters: one row each, read by the client, the gateway and the engine.

`GenerateOptions` is the table. Its keys are the names of the parameters, their types are what callers write,
and the `Parameter` beside a type says the rest: range, default, spelling in every API, place on the wire and
in the engine. `Sampling` has the values that reach the engine, resolved.

The client fills a request by it (`Parameter.put`), the JSON frontends know by it which members to read, the
gateway takes the ranges from it, and `python -m diptych.parameters` prints it as Markdown. Structured
parameters (tools, response_format, grammars) have readers of their own.

Plain data: imports neither protobuf nor anything else of Diptych.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypedDict, get_args, get_type_hints

Texts = str | Sequence[str]
"""Several texts, or a single one as it is."""
TokenIds = Sequence[int]
TokenBiases = Mapping[int, float]

INT32: Final = (-(2**31), 2**31 - 1)
UINT32: Final = (0, 2**32 - 1)
INT64: Final = (-(2**63), 2**63 - 1)

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: logits / t would leave the range of float32 for nothing."""
SAME: Final = "="
"""Spelling that is the parameter's own name."""


class Spelling(NamedTuple):
    """Names of a parameter in three APIs; "" where an API has none."""

    openai: str = ""
    vllm: str = ""
    kserve: str = ""


EVERYWHERE: Final = Spelling(SAME, SAME, SAME)
VLLM: Final = Spelling(vllm=SAME)
VLLM_KSERVE: Final = Spelling(vllm=SAME, kserve=SAME)
OPENAI_VLLM: Final = Spelling(SAME, SAME)
NOT_JSON: Final = Spelling()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Row of the table.

    Attributes:
        wire: path in `diptych.v1.GenerateRequest`.
        about: one line for the reference page.
        spelling: names in other APIs.
        low, high: range of the value, both included; of each value where there are several.
        above: lower end that is not included, instead of `low`.
        most: longest list; 0 = no limit.
        longest: bytes of a text, or of each text of a list; 0 = no limit.
        fits: integers that the wire field holds.
        default: meaning of an absent value, for the reference page.
        note: follows the range.
        own_reader: the OpenAI frontend reads the member in code of its own: it means something else there.
        inverted: the JSON APIs count the other way round.
        duration: the wire field is a Duration, the value seconds.
        engine: class and field of the workers; "" where the gateway alone needs it.
        on_device: the samplers of devices have it. A request with any other is sampled on the host.
        name, type: the key and its type, which `_rows` fills in.
        group, wire_field: the two parts of `wire`, likewise; "" is the group of the request itself.
    """

    wire: str
    about: str
    spelling: Spelling = NOT_JSON
    low: float | None = None
    high: float | None = None
    above: float | None = None
    most: int = 0
    longest: int = 0
    fits: tuple[int, int] = UINT32
    default: str = "off"
    note: str = ""
    own_reader: bool = False
    inverted: bool = False
    duration: bool = False
    engine: str = ""
    on_device: bool = False
    name: str = ""
    type: Any = None
    group: str = ""
    wire_field: str = ""

    @property
    def http(self) -> str:
        """Member of the bodies of the OpenAI frontend, which knows vLLM's as well."""
        return self.spelling.openai or self.spelling.vllm

    @property
    def rule(self) -> str:
        """Words for the range, as they follow "must be"; "" without one."""
        low, high, note = self.low, self.high, f" ({self.note})" if self.note else ""
        if self.above is not None:
            upper = "" if high is None else f" and at most {high:g}"
            return f"above {self.above:g}{upper}{' seconds' if self.duration else ''}{note}"
        if low is not None and high is not None:
            return f"{'' if self.type is int else 'a number '}from {low:g} to {high:g}{note}"
        if high is not None:
            return f"at most {high:g}{note}"
        return "" if low is None else f"at least {low:g}{note}"

    @property
    def integers(self) -> tuple[int, int]:
        """The lowest and highest integer that is in the range and that the wire field holds."""
        low, high = self.fits
        low = low if self.low is None else max(low, math.ceil(self.low))
        return low, high if self.high is None else min(high, math.floor(self.high))

    def allows(self, value: float) -> bool:
        """Return whether `value` is in the range; NaN, which compares false with everything, never is."""
        above = value > self.above if self.above is not None else self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high)

    def put(self, request: Any, value: Any) -> None:
        """Set the wire field of `request`, a `GenerateRequest`.

        Raises TypeError or ValueError, as protobuf does, for a value that the field cannot hold.
        """
        message, wire_field = getattr(request, self.group) if self.group else request, self.wire_field
        if self.type in (Texts, TokenIds):
            getattr(message, wire_field).extend(value)
        elif self.type is TokenBiases:
            getattr(message, wire_field).update(value)
        elif self.duration:
            getattr(message, wire_field).FromNanoseconds(round(value * 1e9))
        else:
            setattr(message, wire_field, value)


_MODEL: Final = "the model's"


# fmt: off
class GenerateOptions(TypedDict, total=False):
    """Options of a request; an absent key means the model's own default, 0 is a real 0."""

    # How tokens are chosen
    temperature: Annotated[float, Parameter(
        "sampling.temperature", "Divides the logits: lower is more predictable, 0 is greedy.",
        EVERYWHERE, low=0.0, high=100.0, default=_MODEL, engine="SamplingParams.temperature", on_device=True)]
    top_p: Annotated[float, Parameter(
        "sampling.top_p",
        "Keeps the fewest likeliest tokens that have this much of the probability; 1 is off.",
        EVERYWHERE, above=0.0, high=1.0, default=_MODEL, engine="SamplingParams.top_p", on_device=True)]
    top_k: Annotated[int, Parameter(
        "sampling.top_k", "Keeps this many of the likeliest tokens.",
        EVERYWHERE, low=-1, note="-1 or 0 = off", fits=INT32, default=_MODEL, engine="SamplingParams.top_k",
        on_device=True)]
    min_p: Annotated[float, Parameter(
        "sampling.min_p", "Keeps tokens at least this likely, relative to the likeliest; 0 is off.",
        EVERYWHERE, low=0.0, high=1.0, default=_MODEL, engine="SamplingParams.min_p", on_device=True)]
    top_n_sigma: Annotated[float, Parameter(
        "sampling.top_n_sigma",
        "Keeps tokens whose logit is within so many standard deviations of the largest; 0 is off.",
        VLLM_KSERVE, low=0.0, high=1000.0, engine="SamplingParams.top_n_sigma")]
    # Penalties and biases have the ranges of the OpenAI API.
    frequency_penalty: Annotated[float, Parameter(
        "sampling.frequency_penalty",
        "Lowers the logit of a token by this for each time that it is in the output.",
        EVERYWHERE, low=-2.0, high=2.0, engine="SamplingParams.frequency_penalty")]
    presence_penalty: Annotated[float, Parameter(
        "sampling.presence_penalty", "Lowers the logit of a token by this once it is in the output.",
        EVERYWHERE, low=-2.0, high=2.0, engine="SamplingParams.presence_penalty")]
    # A divisor of logits: near 0 they overflow. The lowest is exact in float32.
    repetition_penalty: Annotated[float, Parameter(
        "sampling.repetition_penalty",
        "Divides positive logits of tokens in prompt and output, multiplies negative ones; 1 is off.",
        VLLM_KSERVE, low=1 / 64, high=100.0, default=_MODEL, engine="SamplingParams.repetition_penalty")]
    seed: Annotated[int, Parameter(
        "sampling.seed", "Makes the output repeatable.",
        EVERYWHERE, fits=INT64, default="random", engine="SamplingParams.seed", on_device=True)]
    logit_bias: Annotated[TokenBiases, Parameter(
        "sampling.logit_bias", "Numbers added to the logits of token ids.",
        OPENAI_VLLM, low=-100.0, high=100.0, most=1024, engine="SamplingParams.logit_bias")]
    allowed_token_ids: Annotated[TokenIds, Parameter(
        "sampling.allowed_token_ids", "Forbids all other tokens.",
        VLLM_KSERVE, most=16_384, default="all", engine="SamplingParams.allowed_token_ids")]
    bad_words: Annotated[Texts, Parameter(
        "sampling.bad_words", "Texts that must not come.",
        VLLM, most=128, longest=128, default="none", engine="SamplingParams.bad_words")]
    # How many answers
    n: Annotated[int, Parameter(
        "sampling.n", "Outputs of the request.",
        EVERYWHERE, low=1, high=128, default="1", engine="Attempt.choices")]
    best_of: Annotated[int, Parameter(
        "sampling.best_of", "Outputs that are made, of which the `n` likeliest are kept.",
        EVERYWHERE, low=1, high=128, default="n", engine="Attempt.choices")]
    # All beams of a request step together, and hold blocks of their own.
    beam_width: Annotated[int, Parameter(
        "sampling.beam_width", "Beams of a beam search. Excludes temperature, seed and stop strings.",
        Spelling(vllm="use_beam_search", kserve=SAME), low=1, high=16, own_reader=True,
        engine="Attempt.beam_width")]
    # Where they end
    max_tokens: Annotated[int, Parameter(
        "stopping.max_tokens", "Longest output in tokens.",
        EVERYWHERE, low=1, default="up to the context; 16 at /v1/completions", own_reader=True,
        engine="Attempt.max_tokens")]
    min_tokens: Annotated[int, Parameter(
        "stopping.min_tokens", "Stop tokens cannot come before.",
        VLLM_KSERVE, default="0", engine="Attempt.min_tokens")]
    stop: Annotated[Texts, Parameter(
        "stopping.stop", "Texts at which the output ends.",
        EVERYWHERE, most=16, longest=1024, default="none")]
    stop_token_ids: Annotated[TokenIds, Parameter(
        "stopping.stop_token_ids", "Token ids at which the output ends.",
        VLLM_KSERVE, most=128, default="none", engine="Attempt.stop_token_ids")]
    ignore_eos: Annotated[bool, Parameter(
        "stopping.ignore_eos", "Goes on after the end of sequence.",
        VLLM_KSERVE, default="false", engine="Attempt.stop_token_ids")]
    include_stop_in_output: Annotated[bool, Parameter(
        "stopping.include_stop_in_output", "Keeps the stop string in the text.",
        Spelling(vllm="include_stop_str_in_output", kserve="include_stop_str_in_output"), default="false")]
    time_limit_s: Annotated[float, Parameter(
        "stopping.time_limit", "Seconds after which the output ends as it is; a deadline is the hard limit.",
        above=0.0, high=86400.0, duration=True)]
    # What is returned
    logprobs: Annotated[int, Parameter(
        "response.logprobs", "Alternatives beside each token; 0 = the token's own logprob only.",
        OPENAI_VLLM, high=20, own_reader=True, engine="SamplingParams.logprobs")]
    prompt_logprobs: Annotated[int, Parameter(
        "response.prompt_logprobs", "The same for tokens of the prompt.",
        Spelling(openai="logprobs"), high=20, own_reader=True, engine="Attempt.prompt_logprobs")]
    echo: Annotated[bool, Parameter(
        "response.echo_prompt", "Returns the prompt as well: as token ids, or as text over HTTP.",
        Spelling(openai=SAME), default="false", own_reader=True)]
    return_text: Annotated[bool, Parameter(
        "response.text", "Returns text.",
        default="true")]
    return_token_ids: Annotated[bool, Parameter(
        "response.token_ids", "Returns token ids.",
        VLLM, default="true; false over HTTP", own_reader=True)]
    skip_special_tokens: Annotated[bool, Parameter(
        "response.skip_special_tokens", "Leaves control tokens out of the text.",
        VLLM_KSERVE, default="true")]
    stream_interval: Annotated[int, Parameter(
        "response.stream_interval", "Tokens in each message of a stream.",
        Spelling(kserve=SAME), low=1, high=1024, default="1")]
    timings: Annotated[bool, Parameter(
        "response.timings", "Returns where the time went.",
        default="true; false over HTTP")]
    # The request itself
    lora: Annotated[str, Parameter(
        "lora", "LoRA adapter by name, where `model` is its base; its name as `model` does the same.",
        longest=128, default="none", engine="Attempt.adapter")]
    priority: Annotated[int, Parameter(
        "priority",
        "Order in the queue: higher runs earlier. Lower does in the JSON APIs, as with vLLM and Triton.",
        VLLM_KSERVE, fits=INT32, default="0", inverted=True, engine="Attempt.priority")]
    session_id: Annotated[str, Parameter(
        "session_id", "Names a conversation, for routing to its cached prefix.",
        Spelling(openai="prompt_cache_key"), longest=256, default="none")]
    request_id: Annotated[str, Parameter(
        "request_id", "Names the request, for CancelRequest and logs.",
        VLLM, longest=128, default="random")]
    cache_salt: Annotated[str, Parameter(
        "cache.salt", "Keeps cached prefixes apart from those of other salts.",
        VLLM_KSERVE, longest=256, default="none")]
    bypass_cache_read: Annotated[bool, Parameter(
        "cache.bypass_read", "Computes the whole prompt.",
        default="false", engine="Attempt.cache_read")]
    bypass_cache_write: Annotated[bool, Parameter(
        "cache.bypass_write", "Leaves the prompt out of the prefix cache.",
        default="false", engine="Attempt.cache_write")]
# fmt: on


def _rows() -> Iterator[Parameter]:
    for name, hint in get_type_hints(GenerateOptions, include_extras=True).items():
        kind, row = get_args(hint)
        spelling = Spelling(*(name if word == SAME else word for word in row.spelling))
        group, _, wire_field = row.wire.rpartition(".")
        yield replace(row, name=name, type=kind, spelling=spelling, group=group, wire_field=wire_field)


PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType({row.name: row for row in _rows()})
"""Rows by name, in the order of the reference page."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved values that the engine samples by, in the meaning of `diptych.worker.v1.Sampling`.

    The default of a field changes nothing. Lists stay out of `repr`, and so of logs: callers wrote them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Number in [0, 2**64): a caller's signed seed in two's complement, else a random one."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, repr=False)
    allowed_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Empty is all."""
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Sequences of at least one token; the last of each cannot come right after the others."""
    top_n_sigma: float = 0.0


SAMPLING_NUMBERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {one.name: PARAMETERS[one.name] for one in fields(Sampling) if PARAMETERS[one.name].type in (int, float)}
)
"""Rows of the fields of `Sampling` that are numbers."""
OFF: Final[Mapping[str, Any]] = MappingProxyType(
    {one.name: getattr(Sampling(), one.name) for one in fields(Sampling)}
)
"""Values of the fields of `Sampling` that change nothing."""


_TYPE_NAMES: Final = {
    float: "number",
    int: "integer",
    bool: "true or false",
    str: "text",
    Texts: "texts",
    TokenIds: "token ids",
    TokenBiases: "numbers by token id",
}


def markdown() -> str:
    """Return the table as a Markdown table, one line a parameter."""
    titles = (
        "Python",
        "gRPC field",
        "OpenAI",
        "vLLM",
        "KServe",
        "Engine",
        "Type",
        "Range",
        "Default",
        "Meaning",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in PARAMETERS.values():
        code = [f"`{name}`" if name else "" for name in (row.name, row.wire, *row.spelling, row.engine)]
        cells = (*code, _TYPE_NAMES[row.type], _limits(row), row.default, row.about)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _limits(row: Parameter) -> str:
    lists = f"at most {row.most}" if row.most else ""
    texts = f"at most {row.longest} bytes{' each' if row.most else ''}" if row.longest else ""
    return ", ".join(filter(None, (row.rule, lists, texts)))


if __name__ == "__main__":
    print(markdown())
