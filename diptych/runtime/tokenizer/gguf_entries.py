"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from diptych.runtime.tokenizer.gguf_metadata import Value
from diptych.runtime.tokenizer.source import UnusableTokenizer


class GgufEntries:
    """Typed access to GGUF metadata; a key of the wrong type is a malformed file."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values

    def text(self, key: str) -> str | None:
        value: str | None = self._get(key, str)
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._get(key, bool)
        return value

    def number(self, key: str) -> int | None:
        value: int | None = self._get(key, int)
        return value

    def special_id(self, name: str, vocab_size: int) -> int | None:
        """Return ``tokenizer.ggml.<name>_token_id``, None where the file has none."""
        token_id = self.number(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise UnusableTokenizer(f"tokenizer.ggml.{name}_token_id is outside the vocabulary")
        return token_id

    def texts(self, key: str) -> list[str]:
        values: list[str] | None = self._get(key, list)
        if not values or not isinstance(values[0], str):
            raise UnusableTokenizer(f"{key} is missing or holds no strings")
        return values

    def numbers(self, key: str) -> list[int]:
        values: list[int] | None = self._get(key, list)
        if values is not None and values and not isinstance(values[0], int):
            raise UnusableTokenizer(f"{key} holds no integers")
        return values or []

    def scores(self, key: str) -> list[float]:
        values: list[float] | None = self._get(key, list)
        if not values or isinstance(values[0], bool) or not isinstance(values[0], int | float):
            raise UnusableTokenizer(f"{key} is missing or holds no numbers")
        return values

    def _get(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        # bool is an int to Python; a flag where a number belongs is still a mistake.
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise UnusableTokenizer(f"{key} should be {kind.__name__}, is {type(value).__name__}")
        return value
