"""Signed token with which a client continues a broken stream at any gateway of the same secret.

The token holds how the request was resolved (its seed, its limit), bound to the request by a digest.
The client sends the request again with it and with the ids that it has. It holds no text, no ids and no
address: a keyed digest, a seed and two numbers mean nothing without the key.

    version 2 | expires, seconds since 1970, 8 | seed, 8 | max_tokens, 4 | digest, 16 | MAC, 16
    version 3 | the same to the digest | model, 4 | MAC, 16

Version 3 is of gateways with several models: it finds the one that began the stream, whatever the name that
the client asked for stands for by then.

HMAC-SHA256 (RFC 2104), cut to 128 bits, as base64url without padding. The key is derived from the secret of
the fleet, so that no other use of that secret can make a token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Final, NamedTuple

from diptych.parameters import OFF, Sampling
from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from gateway.request.parsed_request import ParsedRequest

FIELD: Final = "resume_token"
RECEIVED: Final = "received_token_ids"
LIFETIME_S: Final = 3600
VERSION: Final = 2
TAGGED: Final = 3
_PARAMETERS_OF_VERSION: Final = 11  # fields of `Sampling`
_BODY: Final = struct.Struct(">BQQI16s")
_TAG_BYTES: Final = 4
_MAC_BYTES: Final = 16
_CHARS: Final = {  # by version
    VERSION: -(-(_BODY.size + _MAC_BYTES) * 4 // 3),
    TAGGED: -(-(_BODY.size + _TAG_BYTES + _MAC_BYTES) * 4 // 3),
}


class Opened(NamedTuple):
    """Content of a genuine token."""

    seed: int
    max_tokens: int
    digest: bytes


class ResumeTokens:
    """Maker and reader of tokens.

    Args:
        secret: of the fleet, the same for all gateways that take over from one another.
        model_digest: of the model's files: another model would go on with another text.
        wall_clock: seconds since 1970. The gateways' clocks need to agree to minutes.
        several: returns whether this gateway serves other models as well.
    """

    def __init__(
        self,
        secret: bytes,
        model_digest: str,
        *,
        wall_clock: Callable[[], float],
        several: Callable[[], bool] = lambda: False,
    ) -> None:
        self._key = hmac.digest(secret, b"diptych resume token", "sha256")
        self._model = model_digest.encode()
        self._tag = hashlib.sha256(self._model).digest()[:_TAG_BYTES]
        self._clock = wall_clock
        self._several = several

    def began(self, token: str) -> bool:
        """Return whether a token names this model; it may be forged, or too old."""
        if len(token) != _CHARS[TAGGED]:
            return False
        return _decoded(token)[_BODY.size : -_MAC_BYTES] == self._tag

    def issue(self, request: ParsedRequest, max_tokens: int, tenant: str) -> str:
        """Make the token of a tenant's resolved request; ``max_tokens`` is of the whole output."""
        expires = int(self._clock()) + LIFETIME_S
        version, tag = (TAGGED, self._tag) if self._several() else (VERSION, b"")
        digest = self._digest(request, tenant)
        body = _BODY.pack(version, expires, request.sampling.seed, max_tokens, digest) + tag
        return base64.urlsafe_b64encode(body + self._mac(body)).rstrip(b"=").decode()

    def open(self, token: str) -> Opened:
        """Return the content. Raises InvalidParameter: not a token of this fleet, altered, or too old."""
        # The length first: what is longer is not worth decoding.
        data = _decoded(token) if len(token) in _CHARS.values() else b""
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)) or len(token) != _CHARS.get(body[0]):
            raise InvalidParameter(FIELD, "is not a token of this service")
        _, expires, seed, max_tokens, digest = _BODY.unpack_from(body)
        if self._clock() > expires:
            raise InvalidParameter(FIELD, "has expired")
        return Opened(seed, max_tokens, digest)

    def check(self, opened: Opened, request: ParsedRequest, tenant: str) -> None:
        """Raise InvalidParameter unless the token was made for ``request``, which was resolved with its seed.

        Digests are compared in constant time.
        """
        if not hmac.compare_digest(opened.digest, self._digest(request, tenant)):
            raise InvalidParameter(FIELD, "was made for another request, another model or another tenant")

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_MAC_BYTES]

    def _digest(self, request: ParsedRequest, tenant: str) -> bytes:
        """Digest all that the output depends on; keyed, so that a guessed prompt cannot be tested."""
        sampling, constraint = request.sampling, request.constraint
        rest = (
            tenant,
            request.model,
            *_sampling_values(sampling),
            *(request.max_tokens, request.min_tokens),
            *(request.stop, request.stop_token_ids, request.ignore_eos, request.include_stop),
            *(request.want_text, request.skip_special, request.logprobs),
            *(request.n, request.best_of, request.beam_width),
            None if constraint is None else constraint.grammar.digest,
            "one call" if request.tools is not None and request.tools.single else request.tools is not None,
            *(() if request.reasoning is None else request.reasoning.key),
            *(() if request.images is None else (image.digest for image in request.images.images)),
            *(() if request.adapter is None else ("adapter", request.adapter.digest)),
        )
        digest = hashlib.sha256(array("Q", request.prompt_ids).tobytes())
        digest.update(self._model)
        digest.update(repr(rest).encode())
        return hmac.digest(self._key, b"request" + digest.digest(), "sha256")[:_MAC_BYTES]


def _sampling_values(sampling: Sampling) -> Iterator[object]:
    """Yield the values in the order of their fields.

    Parameters that came after this version of the token count where they are set, so that a token is good at
    gateways that do not know them yet.
    """
    for number, parameter in enumerate(fields(sampling)):
        value = getattr(sampling, parameter.name)
        if number < _PARAMETERS_OF_VERSION or value != OFF[parameter.name]:
            yield sorted(value.items()) if isinstance(value, Mapping) else value


def _decoded(token: str) -> bytes:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):  # not ASCII is a ValueError
        return b""


def resumable(request: ParsedRequest) -> bool:
    """Return whether a broken stream of it can continue: the ids that a client has are all that it has."""
    return request.choices == 1 and request.beam_width is None and request.want_token_ids


def refuse_several(request: ParsedRequest) -> None:
    """Raise UnsupportedFeature for outputs that do not stream one by one."""
    for path, wanted in (
        ("sampling.n", request.n > 1),
        ("sampling.best_of", request.best_of is not None),
        ("sampling.beam_width", request.beam_width is not None),
    ):
        if wanted:
            raise UnsupportedFeature(path, "a stream of several outputs cannot be resumed")


def resumed(
    request: ParsedRequest, opened: Opened, received: tuple[int, ...], vocab_size: int
) -> ParsedRequest:
    """Return the request as it continues after ``received``, without what came with its first message.

    Raises `InvalidParameter` for ids that this request cannot have got.
    """
    if len(received) > opened.max_tokens:
        raise InvalidParameter(RECEIVED, "has more ids than max_tokens")
    if any(one >= vocab_size for one in received):
        raise InvalidParameter(RECEIVED, f"every id must be below {vocab_size}")
    return replace(
        request, received=received, output_limit=opened.max_tokens, prompt_logprobs=None, echo=False
    )
