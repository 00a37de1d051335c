"""Chat template in a file of its own, in place of the model's."""

from __future__ import annotations

from pathlib import Path


def read_template(path: Path) -> str:
    """Return the text of the template at `path`. Raises ValueError, which says what to do."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: give a Jinja template") from None
    if not text.strip():
        raise ValueError(f"{path} is empty: give a Jinja template")
    return text
