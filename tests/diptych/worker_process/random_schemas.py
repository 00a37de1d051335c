"""JSON schemas made at random, of everything that grammars are made of, small enough to be filled soon."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "x", "été", 'a "quoted" one', "deep/er", "😀")
PATTERNS = ("^[a-c]{1,4}$", "^(ab|c)+d?$", "[0-9]{2}", "^x?y?z?$")
FORMATS = ("uuid", "ipv4")  # of a date the grammar does not know whether its year has a 29 February
CONSTANTS = (None, True, 0, -1.5, "", 'é\n"\\', [1, "two"], {"k": [None]})
DEPTH = 3


def schema(seed: int) -> Schema:
    """The same for the same seed."""
    rng = random.Random(seed)
    made = _any(rng, 0)
    if rng.random() < 0.2:  # as pydantic writes them
        part = {"$ref": "#/$defs/Part"}
        several = {"type": "array", "items": part, "maxItems": 2}
        made = _closed({"one": part, "more": several}, ["one"]) | {"$defs": {"Part": _any(rng, 2)}}
    return made


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = [_boolean, _integer, _number, _string, _enum, _const]
    return rng.choice([*leaves, _array, _object, _object, _choice] if depth < DEPTH else leaves)(rng, depth)


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    made: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 9, 12_345])}
    if rng.random() < 0.2:
        made["exclusiveMaximum"] = made.pop("maximum") + 1
    return made


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([1, 2.5, 100])}


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(CONSTANTS, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(CONSTANTS)}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    made: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.3:
        made["prefixItems"] = [_any(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    return made | {"items": _any(rng, depth + 1)}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.6]
    return _closed({name: _any(rng, depth + 1) for name in names}, required)


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
