"""Errors of a request that can never be served as it is: bad, unsupported or too long."""

import grpc

from diptych.runtime.errors.base import DiptychError, FieldViolation


class InvalidParameter(DiptychError):
    """A field is missing or out of range. `description` says the rule, not the value."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_PARAMETER"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}", violations=(FieldViolation(field, description),))


class UnsupportedFeature(DiptychError):
    """A field that this build or model does not implement; nothing is ignored in silence."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "UNSUPPORTED_FEATURE"

    def __init__(self, field: str, description: str = "is not supported by this server") -> None:
        super().__init__(f"{field}: {description}", violations=(FieldViolation(field, description),))


class ContextLengthExceeded(DiptychError):
    """Prompt plus max_tokens is over the model's context, or over the whole KV pool. All in tokens.

    The message is OpenAI's sentence: clients cut their history when they find its beginning.

    ``at_least``: the prompt was not counted, because this many tokens are too many by themselves. ``field``:
    the one to change, if known: the prompt, or what asks for more output than fits beside it.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(
        self, prompt_tokens: int, max_tokens: int, limit: int, *, at_least: bool = False, field: str = ""
    ) -> None:
        bound = "at least " if at_least else ""
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{bound}{prompt_tokens + max_tokens} tokens ({bound}{prompt_tokens} in the messages, "
            f"{max_tokens} in the completion). Please reduce the length of the messages or completion."
        )
        super().__init__(
            message,
            violations=(FieldViolation(field, message),) if field else (),
            metadata={
                "prompt_tokens": str(prompt_tokens),
                "max_tokens": str(max_tokens),
                "limit": str(limit),
            },
        )


class NoValidToken(DiptychError):
    """Output that cannot go on: the request's bans or its grammar leave no token that may come next, or
    following the grammar takes more work than one token may. Both are seen with the model's vocabulary only.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_VALID_TOKEN"

    def __init__(self) -> None:
        super().__init__(
            "the constraints of the request leave no token that may come next, or its grammar is too complex"
        )
