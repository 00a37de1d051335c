"""The configuration of a PEFT adapter, adapter_config.json: which modules it adapts, at what rank and scale.

Field names and rules are those of Hugging Face's peft (`LoraConfig`). A field that changes what is computed
and is not computed here is refused by its name, and so is any unknown field with a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from diptych.engine.adapters.adapter import BadAdapter

_READ: Final = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
        "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
_OF_TRAINING: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Fields of training, or of how peft runs: they change nothing that is computed here."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "bias": ("none",),
        # The other ways of beginning change the base's weights, too.
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    }
)
"""The values of other fields beside none, false and empty, for which nothing else has to be computed."""
_WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_dora": "DoRA is not computed",
        "modules_to_save": "modules that replace those of the base are not computed",
        "bias": "biases that change are not computed",
        "target_parameters": "adapters of experts, and of other tensors without a module, are not computed",
        "trainable_token_indices": "embeddings that change are not computed",
        "init_lora_weights": "its base has other weights: convert it as peft describes",
    }
)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PeftConfig:
    """The fields that say what is computed."""

    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int]
    """Ranks of single modules by pattern."""
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    """A regular expression for whole names, `all-linear`, or ends of names."""
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    """Layers that `targets`, where it is a list, applies to; None: all."""
    layer_patterns: tuple[str, ...]

    def adapts(self, module: str) -> bool:
        """Return whether the adapter changes a module, by its whole name in the model."""
        if _matches(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        if not _matches(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        patterns = self.layer_patterns or (r"[^.]*",)
        found = (re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns)
        number = next((int(match[1]) for match in found if match is not None), None)
        return number in self.layers

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's change."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's change: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def parse_peft_config(fields: Mapping[str, Any]) -> PeftConfig:
    """Return the configuration that the fields of an adapter_config.json describe.

    Raises BadAdapter, naming the field, for what is not computed or is of another type.
    """
    for name, value in fields.items():
        _check_neutral(name, value)
    config = PeftConfig(
        rank=_rank(fields.get("r"), "r"),
        alpha=_number(fields.get("lora_alpha"), "lora_alpha"),
        rank_stabilised=bool(fields.get("use_rslora")),
        ranks={key: _rank(value, "rank_pattern") for key, value in _table(fields, "rank_pattern").items()},
        alphas={
            key: _number(value, "alpha_pattern") for key, value in _table(fields, "alpha_pattern").items()
        },
        targets=_names(fields, "target_modules"),
        excluded=_names(fields, "exclude_modules"),
        layers=_layers(fields.get("layers_to_transform")),
        layer_patterns=_listed(_names(fields, "layers_pattern")),
    )
    if not config.targets:
        raise BadAdapter("target_modules: is empty")
    _check_patterns(config)
    return config


def _check_neutral(name: str, value: object) -> None:
    if name in _READ or name in _OF_TRAINING or value is None or value is False:
        return
    if value in ("", [], {}) or any(
        value == one and type(value) is type(one) for one in _NEUTRAL.get(name, ())
    ):
        return
    raise BadAdapter(f"{name}: {_WHY.get(name, f'{value!r} is not computed')}")


def _check_patterns(config: PeftConfig) -> None:
    """Raise BadAdapter for a pattern that is no regular expression."""
    patterns = {
        "target_modules": [config.targets] if isinstance(config.targets, str) else [],
        "exclude_modules": [config.excluded] if isinstance(config.excluded, str) else [],
        "rank_pattern": list(config.ranks),
        "alpha_pattern": list(config.alphas),
        "layers_pattern": list(config.layer_patterns),
    }
    for field, ones in patterns.items():
        for pattern in ones:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadAdapter(f"{field}: {pattern!r} is no regular expression: {error}") from None


def _matches(names: str | Collection[str], module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(table: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Return the value of the first pattern that matches the end of a module's name."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _rank(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadAdapter(f"{field}: {value!r} is no rank, a whole number above 0")
    return value


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadAdapter(f"{field}: {value!r} is no number")
    return float(value)


def _table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise BadAdapter(f"{name}: must be an object")
    return value


def _names(fields: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    value = fields.get(name) or ()
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise BadAdapter(f"{name}: must be a text or a list of texts")
    return tuple(value)


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _layers(value: object) -> frozenset[int] | None:
    numbers = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or not all(isinstance(one, int) for one in numbers):
        raise BadAdapter("layers_to_transform: must be a whole number or a list of them")
    return frozenset(numbers)
