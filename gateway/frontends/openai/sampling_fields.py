"""What completions and chat completions have in common: sampling, stopping, caching, order.

Only types are checked here, and the lengths of lists: several prompts get a copy each. Ranges are the core's
business, which names the field that is out of it.
"""

from __future__ import annotations

from typing import Final

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.request_builder import RequestBuilder
from gateway.request.json_members import (
    INT32,
    INT64,
    SAMPLING_NUMBERS,
    UINT32,
    Members,
    array,
    integer,
    number,
    string,
    token_ids,
)

# Accepted and without effect: they concern OpenAI's own books and storage.
IGNORED: Final = ("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_retention")
_COUNTS: Final = ("n", "best_of")


def read_knobs(body: Members, draft: RequestBuilder) -> None:
    """Everything but prompt, output limit, logprobs and structure, into ``draft``."""
    body.ignore(*IGNORED)
    request = draft.request
    request.model = body.required("model", body.string("model"))
    _sampling(body, request.sampling, draft.names)
    _stopping(body, request.stopping)
    _biases(body, request.sampling)
    if (request_id := body.string("request_id")) is not None:
        request.request_id = request_id
    if (salt := body.string("cache_salt")) is not None:
        request.cache.salt = salt
    if (key := body.string("prompt_cache_key")) is not None:
        request.session_id = key
    if (priority := body.integer("priority", (-INT32[1], INT32[1]))) is not None:
        request.priority = -priority  # with vLLM's clients the lower one comes first
    skip = body.flag("skip_special_tokens")
    if skip is not None:
        request.response.skip_special_tokens = skip
    request.response.timings = False
    request.response.token_ids = False


def _sampling(body: Members, sampling: pb.SamplingParams, names: dict[str, str]) -> None:
    for name in SAMPLING_NUMBERS:
        if (value := body.number(name)) is not None:
            setattr(sampling, name, value)
    for name in _COUNTS:
        if (count := body.integer(name, UINT32)) is not None:
            setattr(sampling, name, count)
    if (top_k := body.integer("top_k", INT32)) is not None:
        sampling.top_k = top_k
    if (seed := body.integer("seed", INT64)) is not None:
        sampling.seed = seed
    if body.flag("use_beam_search"):  # as vLLM's clients ask for it: the width is best_of, or else n
        width = sampling.best_of if sampling.HasField("best_of") else sampling.n
        sampling.beam_width = width or 1
        sampling.ClearField("best_of")
        names["sampling.beam_width"] = "use_beam_search"
        if sampling.temperature == 0.0:
            sampling.ClearField("temperature")


def _stopping(body: Members, stopping: pb.StoppingCriteria) -> None:
    stopping.stop.extend(_stop_strings(body))
    ids = body.array("stop_token_ids", limits.MAX_STOP_TOKEN_IDS)
    if ids:
        stopping.stop_token_ids.extend(token_ids("stop_token_ids", ids))
    if (least := body.integer("min_tokens", UINT32)) is not None:
        stopping.min_tokens = least
    if (ignore := body.flag("ignore_eos")) is not None:
        stopping.ignore_eos = ignore
    if (include := body.flag("include_stop_str_in_output")) is not None:
        stopping.include_stop_in_output = include


def _stop_strings(body: Members) -> list[str]:
    value = body.take("stop")
    if value is None:
        return []
    if isinstance(value, str):
        return [string("stop", value)]
    if not isinstance(value, list):
        raise InvalidParameter("stop", "must be a string or an array of strings")
    array("stop", value, limits.MAX_STOP_STRINGS)
    return [string(f"stop[{index}]", text) for index, text in enumerate(value)]


def _biases(body: Members, sampling: pb.SamplingParams) -> None:
    bias = body.raw("logit_bias")
    if bias:
        if len(bias) > limits.MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidParameter("logit_bias", f"must have at most {limits.MAX_LOGIT_BIAS_ENTRIES} entries")
        for key, value in bias.items():
            sampling.logit_bias[_token_id(key)] = number("logit_bias", value)
    allowed = body.array("allowed_token_ids", limits.MAX_ALLOWED_TOKEN_IDS)
    if allowed:
        sampling.allowed_token_ids.extend(token_ids("allowed_token_ids", allowed))
    words = body.array("bad_words", limits.MAX_BAD_WORDS)
    for index, word in enumerate(words or ()):
        sampling.bad_words.append(string(f"bad_words[{index}]", word))


def _token_id(key: str) -> int:
    """A key of ``logit_bias``: JSON has strings only."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidParameter("logit_bias", "must have token ids as keys")
    return integer("logit_bias", int(key), UINT32)


def read_output_limit(body: Members, draft: RequestBuilder, *names: str) -> int | None:
    """``max_tokens`` under the names it goes by; the names must agree. None where none is given."""
    found: int | None = None
    for name in names:
        value = body.integer(name, UINT32)
        if value is None:
            continue
        if found is not None and value != found:
            raise InvalidParameter(name, f"contradicts {draft.names['stopping.max_tokens']}")
        found = value
        draft.names["stopping.max_tokens"] = name
    return found


def read_stream(body: Members) -> tuple[bool, bool]:
    """(stream, with a last event for the usage)."""
    stream = bool(body.flag("stream"))
    options = body.nested("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream")
    with_usage = bool(options.flag("include_usage"))
    options.flag("include_obfuscation")  # padding against eavesdroppers of TLS, which is not in use here
    options.only("continuous_usage_stats", False)
    options.finish()
    return stream, with_usage
