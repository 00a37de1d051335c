"""The choice of what encodes an attempt's images: an encode worker, or the prefill worker itself. Pure.

An encode worker is taken wherever one accepts work. Its cost is the rows that wait there; those of the
attempt's own images are added everywhere but at the worker that the first image belongs to, by rendezvous
hashing: a second prompt with the image finds its embeddings there, unless others have much less to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from diptych.runtime.discovery.records import WorkerRecord


class EncoderCandidate(NamedTuple):
    """An encode worker: the format of its rows, how many wait to be encoded, and whether it takes new work.

    One that does not (it leaves, or is suspected) is better than none.
    """

    worker_id: str
    rows_format: str
    waiting_rows: int
    accepts_work: bool = True


def reads_images(prefill: WorkerRecord, candidates: Sequence[EncoderCandidate]) -> bool:
    """Return whether a prefill worker gets the rows of images, from its own encoder or one of these.

    One of the release before names no format, and encodes itself.
    """
    if prefill.encodes or not prefill.image_rows:
        return True
    return any(one.rows_format == prefill.image_rows for one in candidates)


def choose_encoder(
    image: bytes, rows: int, prefill: WorkerRecord, candidates: Sequence[EncoderCandidate]
) -> str | None:
    """Return the encode worker for an attempt; None where its prefill worker is to encode.

    Args:
        image: digest of its first image.
        rows: of all its images.
    """
    fitting = [one for one in candidates if one.rows_format == prefill.image_rows]
    fitting = [one for one in fitting if one.accepts_work] or ([] if prefill.encodes else fitting)
    if not fitting:
        return None
    home = max(fitting, key=lambda one: _weight(one.worker_id, image))
    cost = {one: one.waiting_rows + (0 if one is home else rows) for one in fitting}
    return min(fitting, key=lambda one: (cost[one], one is not home, one.worker_id)).worker_id


def _weight(worker_id: str, image: bytes) -> bytes:
    return hashlib.blake2b(worker_id.encode(), key=image[:64], digest_size=8).digest()
