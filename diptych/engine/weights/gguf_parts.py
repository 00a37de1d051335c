"""Names of the parts of a GGUF file that was split, as llama.cpp's gguf-split names them.

The programs that give the engine a path know the same by diptych/runtime/gguf_split.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def all_parts(path: Path) -> tuple[Path, ...]:
    """Return the parts of the file that `path` is a part of, the first one first; `path` alone of a whole."""
    found = _NAME.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if found is None or not 1 <= int(found["number"]) <= count:
        return (path,)
    names = (f"{found['stem']}-{number:05d}-of-{count:05d}{path.suffix}" for number in range(1, count + 1))
    return tuple(map(path.with_name, names))
