"""Names under which a model is served, taken from its path where `--model-name` gives none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from diptych.runtime.gguf_split import whole_stem
from diptych.runtime.settings import StartupError

# "Model.Q4_1.gguf" is served as "Model": the quantisation is no part of a model's name.
_QUANTISATION: Final = re.compile(r"[.-](?:I?Q\d\w*|F16|F32|BF16|MXFP4)$", re.IGNORECASE)
_CACHED: Final = re.compile(r"models--(?:(?P<owner>.+?)--)?(?P<name>.+)")


class NamelessModel(StartupError, ValueError):
    """A path that gives a model no name."""


class ModelNames(NamedTuple):
    """Name of a served model, and the other names that requests may use."""

    name: str
    aliases: tuple[str, ...]


def model_names(path: Path, chosen: str | None = None) -> ModelNames:
    """Return the names of the model at `path`; with a `chosen` one, that alone.

    A folder gives its own name, a file its name without suffix and quantisation, wherever links lead to
    them; the whole name of the file and that of a link are aliases. A snapshot of the Hugging Face cache,
    `models--OWNER--NAME/snapshots/HASH`, gives NAME, and OWNER/NAME as an alias. Raises NamelessModel.
    """
    if chosen is not None:
        return ModelNames(chosen, ())
    real = path.resolve()
    if path.is_file() and real.suffix.lower() != path.suffix.lower():
        real = path  # the cache links to files that are named by their digests
    full = whole_stem(real.name) if path.is_file() else real.name
    linked = whole_stem(path.name) if path.is_file() else path.name
    name, aliases = _QUANTISATION.sub("", full) or full, [full, linked]
    if real.parent.name == "snapshots" and (cached := _CACHED.fullmatch(real.parents[1].name)) is not None:
        name, owner = cached["name"], cached["owner"]
        aliases = [f"{owner}/{name}"] if owner else []
        aliases += [linked] if path.name != real.name else []
    if not name.strip():
        raise NamelessModel(f"the path {path} gives the model no name: choose one with --model-name")
    return ModelNames(name, tuple(dict.fromkeys(one for one in aliases if one.strip() and one != name)))
