"""What two workers must agree on before one may write the other's blocks.

Checked when they meet, on both sides; a difference is refused with the field's name. Nothing here can be
converted by index arithmetic yet, so every field must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from diptych.worker.v1 import handoff_pb2


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model and the arrangement of its KV blocks; the field names are those of the protocol."""

    model_digest: str
    dtype: str
    """Of the computation."""
    kv_dtype: str
    kv_layout: str
    """Order of the elements inside a block."""
    block_size: int
    """Tokens a block."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_version: int
    """Of the block keys."""
    tensor_parallel: int = 1

    def to_proto(self) -> handoff_pb2.Fingerprint:
        """The message of the hello."""
        return handoff_pb2.Fingerprint(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: handoff_pb2.Fingerprint) -> Fingerprint:
        """Read a hello's fingerprint; absent fields are empty or zero and so will not match."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


def incompatible_field(a: Fingerprint, b: Fingerprint) -> str | None:
    """The name of the first field in which the two differ, None when blocks can be exchanged."""
    for field in fields(Fingerprint):
        if getattr(a, field.name) != getattr(b, field.name):
            return field.name
    return None
