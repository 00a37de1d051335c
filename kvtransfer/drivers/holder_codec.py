"""Holders of shares of blocks, to and from the messages of a handshake."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker.v1 import handoff_pb2
from kvtransfer.transports.base import KVHolder


def holder_messages(holders: Holders) -> list[handoff_pb2.KVHolder]:
    """Return the holders of a hello."""
    return [holder_message(KVHolder(tuple(shares), "", ())) for shares in holders]


def holder_message(holder: KVHolder) -> handoff_pb2.KVHolder:
    """Return a holder of a welcome."""
    return handoff_pb2.KVHolder(
        shares=map(_share_message, holder.shares), endpoint=holder.endpoint, tokens=holder.tokens
    )


def read_holders(messages: Iterable[handoff_pb2.KVHolder]) -> Holders:
    """Return the shares of each holder of a hello."""
    return [_shares(message) for message in messages]


def read_holder(message: handoff_pb2.KVHolder) -> KVHolder:
    """Return a holder of a welcome."""
    return KVHolder(_shares(message), message.endpoint, tuple(message.tokens))


def _share_message(share: KVShare) -> handoff_pb2.KVHolder.Share:
    return handoff_pb2.KVHolder.Share(
        first_layer=share.layers.start,
        num_layers=len(share.layers),
        first_head=share.heads.start,
        num_heads=len(share.heads),
    )


def _shares(message: handoff_pb2.KVHolder) -> tuple[KVShare, ...]:
    return tuple(
        KVShare(
            range(share.first_layer, share.first_layer + share.num_layers),
            range(share.first_head, share.first_head + share.num_heads),
        )
        for share in message.shares
    )
