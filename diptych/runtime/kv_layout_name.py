"""Names of KV layouts: parts joined by +, of which one names a drafter's segment where blocks have one.

Blocks of two workers fit together where the names are equal but for that part. Where it is equal, too, and
the drafter is the same, the drafter's keys and values mean the same to both.
"""

from __future__ import annotations

_DRAFT = "draft/"


def draft_part(layout: str, dtype: str) -> str:
    """Return the part of a name for a drafter's segment of this layout and type."""
    return f"{_DRAFT}{layout}/{dtype}"


def without_draft(name: str) -> str:
    """Return the name of the same blocks without a drafter's segment."""
    return "+".join(part for part in name.split("+") if not part.startswith(_DRAFT))


def drafter_of(name: str, digest: str) -> str:
    """Return what two workers share whose drafters can read one another's segments; empty without a drafter.

    `name` is that of the layout, `digest` the drafter's.
    """
    parts = [part for part in name.split("+") if part.startswith(_DRAFT)]
    return "/".join([digest, *parts]) if digest else ""
