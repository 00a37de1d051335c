"""Names of the parts of a GGUF file that was split (``model-00001-of-00003.gguf``).

The first part has the metadata, each part some of the tensors (llama.cpp's gguf-split). Any part names them
all; programs know the model by its first one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def all_parts(path: Path) -> tuple[Path, ...]:
    """Return the parts of the file that `path` is a part of, whether they exist or not; else `path` alone."""
    found = _NAME.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if found is None or not 1 <= int(found["number"]) <= count:
        return (path,)
    suffix = path.suffix
    return tuple(
        path.with_name(f"{found['stem']}-{number:05d}-of-{count:05d}{suffix}")
        for number in range(1, count + 1)
    )


def first_part(path: Path) -> Path:
    """Return the part with the metadata; `path` itself where it is no part."""
    return all_parts(path)[0]


def missing_parts(path: Path) -> tuple[Path, ...]:
    """Return the parts beside `path` that do not exist."""
    return tuple(part for part in all_parts(path) if not part.exists())


def whole_stem(name: str) -> str:
    """Return the name of a GGUF file without its suffix and its number of a part."""
    found = _NAME.fullmatch(name)
    return found["stem"] if found else Path(name).stem


def only_split_file(names: Iterable[str]) -> str | None:
    """Return the first part's name if the GGUF files among `names` are parts of one file, None if not."""
    files = [name for name in names if name.lower().endswith(".gguf")]
    firsts = {first_part(Path(name)).name for name in files}
    split = all(len(all_parts(Path(name))) > 1 for name in files)
    return firsts.pop() if split and len(firsts) == 1 else None
