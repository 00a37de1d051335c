"""Registry of the families: their modules, by the names of diptych/model_families.py."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from diptych.engine.models.family import Family, GgufFamily
from diptych.engine.models.shape import UnsupportedModel
from diptych.model_families import GGUF_ARCHITECTURES, MODEL_TYPES, NOT_COMPUTED


def family_of(model_type: object) -> Family:
    """Return the family of a config's `model_type`. Raises UnsupportedModel, naming it."""
    module = MODEL_TYPES.get(str(model_type))
    if module is None:
        raise UnsupportedModel(f"model_type {model_type!r}: {_why_not(model_type, MODEL_TYPES)}")
    families: tuple[Family, ...] = import_module(f"diptych.engine.models.{module}").FAMILIES
    return next(family for family in families if family.name == model_type)


def gguf_family_of(architecture: str) -> GgufFamily:
    """Return the family of a GGUF file's `general.architecture`. Raises UnsupportedModel, naming it."""
    module = GGUF_ARCHITECTURES.get(architecture)
    if module is None:
        raise UnsupportedModel(f"architecture {architecture!r}: {_why_not(architecture, GGUF_ARCHITECTURES)}")
    families: tuple[GgufFamily, ...] = import_module(f"diptych.engine.models.{module}").GGUF_FAMILIES
    return next(family for family in families if family.architecture == architecture)


def folder_family_of(family: str) -> Family:
    """Return the family of Hugging Face folders whose names of matrices a model of `ModelShape.family` has.

    The model may come from a GGUF file, whose architecture is named differently in some families. Raises
    UnsupportedModel.
    """
    if family in MODEL_TYPES or family not in GGUF_ARCHITECTURES:
        return family_of(family)
    families: tuple[Family, ...] = import_module(
        f"diptych.engine.models.{GGUF_ARCHITECTURES[family]}"
    ).FAMILIES
    return families[0]


def _why_not(name: object, known: Iterable[str]) -> str:
    return NOT_COMPUTED.get(str(name)) or f"supported are {', '.join(known)}"
