"""What completions and chat completions have in common: sampling, stopping, caching, order.

Only types are checked here, and the lengths of lists: several prompts get a copy each. Ranges are the core's
business, which names the field that is out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from diptych.parameters import PARAMETERS, UINT32, Parameter, Texts, TokenBiases, TokenIds
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.request_builder import RequestBuilder
from gateway.request.json_members import Members, array, integer, number, string, token_ids

# Accepted and without effect: they concern OpenAI's own books and storage.
IGNORED: Final = ("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_retention")
_ROWS: Final = {row.http: row for row in PARAMETERS.values() if row.http and not row.own_reader}


def read_parameters(body: Members, draft: RequestBuilder) -> None:
    """Read everything but prompt, output limit, logprobs and structure into ``draft``."""
    body.ignore(*IGNORED)
    request = draft.request
    request.model = body.required("model", body.string("model"))
    for name, row in _ROWS.items():
        if (value := body.take(name)) is not None:
            row.put(request, _READERS[row.type](name, value, row))
    if body.flag("use_beam_search"):
        _search_beams(request.sampling, draft.names)
    request.response.timings = False
    request.response.token_ids = False


def _search_beams(sampling: pb.SamplingParams, names: dict[str, str]) -> None:
    """Ask as vLLM's clients do: the width is best_of, or else n."""
    width = sampling.best_of if sampling.HasField("best_of") else sampling.n
    sampling.beam_width = width or 1
    sampling.ClearField("best_of")
    names["sampling.beam_width"] = "use_beam_search"
    if sampling.temperature == 0.0:
        sampling.ClearField("temperature")


def _boolean(name: str, value: object, row: Parameter) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(name, "must be true or false")
    return value


def _integer(name: str, value: object, row: Parameter) -> int:
    if row.inverted:  # with vLLM's clients the lower one comes first
        return -integer(name, value, (-row.fits[1], row.fits[1]))
    return integer(name, value, row.fits)


def _texts(name: str, value: object, row: Parameter) -> list[str]:
    if isinstance(value, str):
        return [string(name, value)]
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a string or an array of strings")
    return [string(f"{name}[{index}]", text) for index, text in enumerate(array(name, value, row.most))]


def _biases(name: str, value: object, row: Parameter) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    if len(value) > row.most:
        raise InvalidParameter(name, f"must have at most {row.most} entries")
    return {_token_id(name, key): number(name, bias) for key, bias in value.items()}


def _token_id(name: str, key: str) -> int:
    """Read a key of ``logit_bias``: JSON has strings only."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidParameter(name, "must have token ids as keys")
    return integer(name, int(key), UINT32)


_READERS: Final[Mapping[object, Callable[[str, object, Parameter], Any]]] = {
    float: lambda name, value, _: number(name, value),
    int: _integer,
    bool: _boolean,
    str: lambda name, value, _: string(name, value),
    Texts: _texts,
    TokenIds: lambda name, value, row: token_ids(name, array(name, value, row.most)),
    TokenBiases: _biases,
}


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
