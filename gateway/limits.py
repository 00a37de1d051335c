"""Bounds that the public surface sets on a request; those of a parameter are in `diptych.parameters`.

Each is tested at the limit and one above it. A bound exists because the value costs time or memory
before a request is admitted, or because larger values have no meaning to the engine. Bounds that depend on
the model (context, vocabulary) are in its `ModelCard`.
"""

from __future__ import annotations

from typing import Final

# --- the message ---------------------------------------------------------------------------------
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024  # gRPC itself answers RESOURCE_EXHAUSTED above this
# A message up to this size is parsed on the event loop (under 1 ms; tokenizing costs 0.4 µs a byte), a
# larger one in a thread.
INLINE_PARSE_BYTES: Final = 2 * 1024

MAX_CALLS: Final = 8192  # at once, waiting ones included; gRPC's own limits on calls lie above

# --- JSON over HTTP ------------------------------------------------------------------------------
MAX_BODY_BYTES: Final = MAX_MESSAGE_BYTES  # 413 above this
MAX_PROMPTS: Final = 128  # of one completions request; each is a request of its own to the workers
# Parsing a body blocks the event loop, and with it all other requests' tokens. Text costs next to nothing,
# members and elements up to 1 µs each, numbers in lists a tenth of that; commas and colons, also those within
# texts, bound their number. Lists of prompts in token ids have their commas after digits.
MAX_JSON_COMMAS: Final = 131_072  # that follow no digit
MAX_JSON_NUMBERS: Final = 524_288  # commas that do
MAX_JSON_COLONS: Final = 65_536
MAX_JSON_LIST: Final = 4096  # elements of lists that have no limit of their own below
MAX_JSON_IDS: Final = 262_144  # token ids: no model served here has a longer context or a larger vocabulary
# Fields that several prompts share are copied for each: 20 MB for 128 prompts with everything at its limit.
MAX_COPIED_BYTES: Final = 32 * 1024 * 1024
MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000  # of x-request-timeout-ms

# --- prompt --------------------------------------------------------------------------------------
# Independent of the model: byte-pair encoding one word of n bytes costs about n log n, and a caller
# gets its answer to a bad request within 50 ms. Ordinary text of this size is about 250,000 tokens.
MAX_PROMPT_BYTES: Final = 1024 * 1024
MAX_MESSAGES: Final = 2048
MAX_MESSAGE_NAME_CHARS: Final = 64
MAX_RENDERED_CHARS: Final = 4 * MAX_PROMPT_BYTES  # of a rendered chat template
MAX_RENDER_SECONDS: Final = 2.0
MAX_TEMPLATE_KWARGS_DEPTH: Final = 16  # objects and arrays inside one another
MAX_TEMPLATE_REFUSAL_CHARS: Final = 200  # of a template's own words in an error
MAX_TEMPLATE_BYTES: Final = 256 * 1024  # the operator's file; a larger one is a mistake

# --- tokenize and detokenize ---------------------------------------------------------------------
MAX_DETOKENIZE_IDS: Final = 262_144  # no model served here has a longer context

# --- structured output and tools -------------------------------------------------------------------
MAX_GRAMMAR_BYTES: Final = 64 * 1024  # a schema, a regular expression, a grammar, all choices together
MAX_SCHEMA_DEPTH: Final = 64  # objects and arrays inside one another
MAX_CHOICES: Final = 1024
MAX_TOOLS: Final = 128
MAX_TOOL_NAME_CHARS: Final = 64
MAX_TOOL_CALLS: Final = 128  # of one assistant turn
MAX_TOOL_CALL_ID_CHARS: Final = 256  # and of a name in a conversation's calls
