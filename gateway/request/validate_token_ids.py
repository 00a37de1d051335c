"""The check of every list of token ids that a caller chooses beside the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.runtime.errors import InvalidParameter


def distinct_token_ids(
    field_path: str, token_ids: Sequence[int], at_most: int, vocab_size: int
) -> tuple[int, ...]:
    """The ids without repetitions, in their order. Raises `InvalidParameter`, naming what is wrong."""
    if len(token_ids) > at_most:
        raise InvalidParameter(field_path, f"must have at most {at_most} ids")
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidParameter(
                f"{field_path}[{index}]", f"must be below the vocabulary size {vocab_size}"
            )
    return tuple(dict.fromkeys(token_ids))
