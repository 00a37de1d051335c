"""Handshake of two workers: model and KV layout must be equal, then a transport is chosen.

Both sides check the fingerprint; a difference is refused with the field's name. Every field must be equal but
two. The ranks of a worker all write, or read, their heads of blocks that hold all heads, so that the degrees
are free. And drafters may differ: then blocks go without a drafter's segment, by transports that can do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from diptych.runtime.kv_layout_name import drafter_of, without_draft
from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.codec import Response
from kvtransfer.drivers.holder_codec import holder_message, read_holders
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports import pull_mapped
from kvtransfer.transports.base import (
    HolderReach,
    HolderReceiver,
    KVHolder,
    Locality,
    RankedReceiver,
    ReceivingTransport,
)
from kvtransfer.transports.pull_frames import PullServer
from kvtransfer.transports.registry import MOVES_SEGMENTS, PULLS_FRAMES, PULLS_MAPPED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FREE = frozenset({"tensor_parallel", "draft_digest"})
"""Fields in which two workers may differ."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Model and KV layout of a worker; the field names are those of the protocol."""

    model_digest: str
    dtype: str
    """Number type of the computation."""
    kv_dtype: str
    kv_layout: str
    """Order of the elements inside a block."""
    block_size: int
    """Tokens a block."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_version: int
    """Version of the hash that makes block keys."""
    tensor_parallel: int = 1
    """Ranks of the worker; two workers may differ in it."""
    sum_parts: int = 1
    """Parts in which products are added: other parts are other bits."""
    expert_parallel: bool = False
    """Parts have whole experts: their products are added in another order."""
    expert_all_to_all: bool = False
    """Rows are sent to their experts: these are added in order of their numbers, whatever their parts."""
    draft_digest: str = ""
    """Digest of the draft model, whose keys and values are a second segment of each block; empty without."""

    @property
    def drafter(self) -> str:
        """Name of what workers share whose drafters read one another's segments; empty without a drafter."""
        return drafter_of(self.kv_layout, self.draft_digest)

    @property
    def of_whole_blocks(self) -> Fingerprint:
        """Properties of whole blocks: the number of ranks that write them does not matter."""
        return replace(self, tensor_parallel=1)

    @property
    def cache_layout(self) -> str:
        """Name of all by which gateways keep caches apart beside model, types and block size."""
        if self.sum_parts == 1:
            return self.kv_layout
        experts = "-experts" if self.expert_parallel else ""
        rows = "-all-to-all" if self.expert_all_to_all else ""
        return f"{self.kv_layout}+parts-{self.sum_parts}{experts}{rows}"

    def to_proto(self) -> handoff_pb2.Fingerprint:
        """Return the message for a hello or welcome."""
        return handoff_pb2.Fingerprint(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: handoff_pb2.Fingerprint) -> Fingerprint:
        """Read a peer's fingerprint; absent fields are empty or zero and so will not match.

        A peer of the release before says nothing of parts: it has one.
        """
        found = {f.name: getattr(message, f.name) for f in fields(cls)}
        return cls(**{**found, "sum_parts": message.sum_parts or 1})


def incompatible_field(a: DataclassInstance, b: DataclassInstance) -> str | None:
    """Return the name of the first field that keeps two workers apart, None if there is none."""
    for field in fields(a):
        if field.name not in _FREE and _compared(a, field.name) != _compared(b, field.name):
            return field.name
    return None


def _compared(fingerprint: DataclassInstance, name: str) -> object:
    value = getattr(fingerprint, name)
    return without_draft(value) if name == "kv_layout" else value


def _admit(transport: ReceivingTransport, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
    """Let a writer register; return a token for each of its processes that has to, its own first."""
    if len(pids) > 1 and isinstance(transport, RankedReceiver):
        return transport.admit_ranks(writer, pids)
    return [transport.admit(writer, pids[0])]


def _admit_holders(
    transport: ReceivingTransport, writer: WriterId, hello: handoff_pb2.HandoffHello
) -> Sequence[KVHolder]:
    """Let the processes of a writer register that hold shares of its blocks; empty where blocks go whole."""
    if not hello.holders or not isinstance(transport, HolderReceiver):
        return ()
    return transport.admit_holders(writer, read_holders(hello.holders), [hello.pid, *hello.rank_pids])


def _unreachable_reason(transport: ReceivingTransport, hello: handoff_pb2.HandoffHello) -> str | None:
    """Return why the processes of a hello cannot use a transport, None if they can."""
    reason = transport.unreachable_reason(Locality(hello.host_id, hello.device, hello.pid))
    if reason is None and isinstance(transport, HolderReach):
        pids = [hello.pid, *hello.rank_pids]
        reason = transport.unreachable_holders(read_holders(hello.holders), pids, hello.holder_devices)
    return reason


def _pull_endpoint(transport: ReceivingTransport, pulls: PullServer | None, *, by_rank: bool) -> str:
    if transport.name in PULLS_MAPPED and not by_rank:
        return pull_mapped.ENDPOINT
    return "" if pulls is None else pulls.endpoint


class Handshake:
    """Answers of the decode worker `decode_id` to the hellos of prefill workers."""

    def __init__(
        self,
        decode_id: WriterId,
        fingerprint: Fingerprint,
        num_blocks: int,
        transports: Sequence[ReceivingTransport],
        pulls: PullServer | None = None,
        block_bytes: int = 0,
    ) -> None:
        """Answer for a pool of `num_blocks` blocks of `block_bytes` bytes."""
        self._decode_id = decode_id
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self.transports = transports
        self._pulls = pulls

    def choose_transport(self, hello: handoff_pb2.HandoffHello) -> ReceivingTransport | str:
        """Return the first of the writer's transports that serves both, else a text naming the obstacle."""
        field = incompatible_field(self._fingerprint, Fingerprint.from_proto(hello.fingerprint))
        if field is not None:
            return field
        whole = self.shares_drafter(hello)
        why = []
        for transport in (t for name in hello.transports for t in self.transports if t.name == name):
            reason = _unreachable_reason(transport, hello)
            if reason is None and not whole and transport.name not in MOVES_SEGMENTS:
                reason = "moves whole blocks, and the drafters differ"
            if reason is None:
                return transport
            why.append(f"{transport.name}: {reason}")
        return f"transports ({'; '.join(why) or 'none in common'})"

    def shares_drafter(self, hello: handoff_pb2.HandoffHello) -> bool:
        """Return whether blocks of this writer have the segments that blocks have here."""
        return Fingerprint.from_proto(hello.fingerprint).drafter == self._fingerprint.drafter

    def make_welcome(
        self, hello: handoff_pb2.HandoffHello, transport: ReceivingTransport, forgotten: int = 0
    ) -> Response:
        """Admit the writer to the transport and return the answer, whose token proves the admission.

        `forgotten` is the count of PrefixForgotten messages so far.
        """
        writer = WriterId(hello.worker_id, hello.incarnation)
        token, *rank_tokens = _admit(transport, writer, [hello.pid, *hello.rank_pids])
        holders = _admit_holders(transport, writer, hello)
        by_rank = bool(holders)
        frames = (by_rank and not transport.in_place) or transport.name in PULLS_FRAMES
        pulls = self._pulls if frames else None
        return Response(
            welcome=handoff_pb2.HandoffWelcome(
                worker_id=self._decode_id.worker_id,
                incarnation=self._decode_id.incarnation,
                fingerprint=self._fingerprint.to_proto(),
                transport=transport.name,
                endpoint=transport.endpoint,
                token=token,
                rank_tokens=rank_tokens,
                holders=map(holder_message, holders),
                num_blocks=self._num_blocks,
                pull_endpoint=_pull_endpoint(transport, pulls, by_rank=by_rank),
                pull_token=b"" if pulls is None else pulls.admit(writer),
                forgotten=forgotten,
                block_bytes=self._block_bytes,
            )
        )
