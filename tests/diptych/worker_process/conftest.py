"""Fixtures that several tests here share."""

from tests.diptych.runtime.tokenizer.bundled import bundled_path

__all__ = ["bundled_path"]
