"""Fixtures that several tests here share."""

from tests.runtime.tokenizer.bundled import bundled_path

__all__ = ["bundled_path"]
