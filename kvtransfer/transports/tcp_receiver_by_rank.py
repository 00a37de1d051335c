"""TCP between the ranks of two groups, the decode worker's end: each rank receives its shares of blocks.

    admitted   a session: one writer, by one link, with a token for each pair of ranks
    arrived    a share came here, or a rank elsewhere says that one did, which it keeps
    placed     its grant is open at this moment, and its bytes match its digest: it is written to its block,
               here at once, elsewhere by an order among the plans of steps
    dropped    it is stale, damaged, or of a session that ended
    complete   all shares of a block were placed: the block has arrived

Whatever rank a share comes to, this process alone decides whether it reaches a block. So the end of a session
here is the fence and the proof, as the end of the one socket is where blocks are sent whole (tcp.py): no
other process of either worker need be heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import Holders, Routes, kv_routes, within
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import KVHolder, ReceiverHooks, TransportError
from kvtransfer.transports.data_listener import DataListener, DataSocket, SocketReceiver
from kvtransfer.transports.held_blocks import write_pieces
from kvtransfer.transports.rank_data import (
    ACCEPTED,
    HEADER,
    ArrivedShare,
    RankBlocks,
    RankEvent,
    SessionBroke,
    joined_digest,
    pieces_bytes,
    session_token,
    share_digest,
    share_hash,
)
from kvtransfer.transports.tcp_by_rank import holders_of


@dataclass(eq=False)
class _Session:
    """Shares that one link of a writer brings."""

    number: int
    writer: WriterId
    senders: int
    routes: Routes
    control: DataSocket | None = None
    """Socket between both workers' own processes."""
    placed: dict[int, tuple[int, dict[int, dict[tuple[int, int], bytes]]]] = field(default_factory=dict)
    """Generation of each slot's grant, and the digests of shares of blocks that are not complete."""

    def place(self, ref: GrantRef, index: int, pair: tuple[int, int], digest: bytes) -> bytes | None:
        """Record a share that was placed; return the digest of the block where it is complete."""
        generation, blocks = self.placed.get(ref.slot, (0, {}))
        if generation != ref.generation:
            blocks = {}
            self.placed[ref.slot] = (ref.generation, blocks)
        found = blocks.setdefault(index, {})
        found[pair] = digest
        if len(found) < len(self.routes):
            return None
        del blocks[index]
        return joined_digest([found[at] for at in self.routes])


class ByRankReceiver:
    """End of the decode worker: takes shares of blocks by rank, and whole ones where workers have one memory.

    Args:
        whole: takes whole blocks.
        memory: blocks of this process, whose `spread` knows of ranks elsewhere.
    """

    in_place = False

    def __init__(self, whole: SocketReceiver, host: str, memory: KVMemory, hooks: ReceiverHooks) -> None:
        self.name = whole.name
        self.unreachable_reason = whole.unreachable_reason
        self._whole, self._memory, self._hooks = whole, memory, hooks
        self._listener = DataListener(host, self._open_reader, self._socket_ended)
        self._ranks = memory.spread if isinstance(memory.spread, RankBlocks) else None
        self._holders = holders_of(memory)
        self._secret = secrets.token_bytes(32)
        self._endpoints: list[str] = []
        """Addresses of holders elsewhere."""
        self._numbers = itertools.count(1)
        self._sessions: dict[int, _Session] = {}

    async def start(self) -> None:
        """Listen on free ports, at ranks elsewhere as well. Raises OSError."""
        await self._whole.start()
        await self._listener.start()
        if self._ranks is None:
            return
        loop = asyncio.get_running_loop()

        def on_event(holder: int, event: RankEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this worker ends
                loop.call_soon_threadsafe(self._on_event, holder, event)

        listening = self._ranks.listen(self._secret, on_event)
        try:
            self._endpoints = [await asyncio.wrap_future(endpoint) for endpoint in listening]
        except TransportError as error:
            raise OSError(str(error)) from error

    @property
    def endpoint(self) -> str:
        """Address for whole blocks as host:port."""
        return self._whole.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """See `SocketReceiver.admit`."""
        self._drop(self._session_of(writer))
        return self._whole.admit(writer, pid)

    def admit_holders(
        self, writer: WriterId, holders: Holders, pids: Sequence[int] = ()
    ) -> Sequence[KVHolder]:
        """See `HolderReceiver.admit_holders`."""
        if len(holders) <= 1 and len(self._holders) <= 1:
            return ()
        try:
            routes = kv_routes(holders, self._holders)
        except ValueError:
            return ()  # of another model, as it seems: whole blocks have all of it
        self._drop(self._session_of(writer))
        session = _Session(next(self._numbers), writer, len(holders), routes)
        self._sessions[session.number] = session
        sources = range(len(holders))
        own = tuple(self._listener.admit(_end_of(session.number, source)) for source in sources)
        found = [KVHolder(tuple(self._holders[0]), self._listener.endpoint, own)]
        for shares, endpoint in zip(self._holders[1:], self._endpoints, strict=True):
            tokens = tuple(session_token(self._secret, session.number, source) for source in sources)
            found.append(KVHolder(tuple(shares), endpoint, tokens))
        return found

    def registered(self, writer: WriterId) -> bool:
        """Return True while the writer's own socket is open."""
        session = self._session_of(writer)
        return self._whole.registered(writer) if session is None else session.control is not None

    def fence(self, writer: WriterId) -> None:
        """End the writer's session, which is the proof: no share of it is placed from here on."""
        if (session := self._session_of(writer)) is not None:
            self._end(session)
        else:
            self._whole.fence(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Do nothing: the frames themselves show what arrived."""

    def link_lost(self, writer: WriterId) -> None:
        """End the session: without a stream the data has no meaning."""
        if (session := self._session_of(writer)) is not None:
            self._end(session)
        else:
            self._whole.link_lost(writer)

    async def close(self) -> None:
        """Stop listening and end every data socket of this process; ranks elsewhere end with it."""
        await self._whole.close()
        for session in list(self._sessions.values()):
            self._drop(session)
        await self._listener.close()

    # -- sessions

    def _session_of(self, writer: WriterId) -> _Session | None:
        return next((found for found in self._sessions.values() if found.writer == writer), None)

    def _end(self, session: _Session) -> None:
        """End a session, whose writer is dead then."""
        self._drop(session)
        self._hooks.dead(session.writer)

    def _drop(self, session: _Session | None) -> None:
        """Place nothing more of a session."""
        if session is None:
            return
        del self._sessions[session.number]
        self._whole.fence(session.writer)  # it was admitted there as well
        for source in range(session.senders):
            self._listener.expel(_end_of(session.number, source))
        if self._ranks is not None:
            for holder in range(1, len(self._holders)):
                self._ranks.end_session(holder, session.number)

    def _socket_ended(self, end: WriterId) -> None:
        session = self._sessions.get(end.incarnation)
        if session is not None:
            self._end(session)

    def _open_reader(self, end: WriterId, connection: DataSocket) -> _ShareReader:
        session, source = self._sessions.get(end.incarnation), int(end.worker_id)
        if session is None:
            raise TransportError("a data connection of a session that ended")
        if source == 0:
            session.control = connection
        pieces = session.routes.get((source, 0), ())
        length = pieces_bytes(self._memory.layout, pieces)

        def take(slot: int, generation: int, index: int, digest: bytes, payload: memoryview) -> None:
            hashed = share_hash(payload)
            share = ArrivedShare(session.number, source, slot, generation, index, digest, hashed, length, 0)
            if (granted := self._destination(session, 0, share)) is not None:
                write_pieces(self._memory, granted[1], pieces, payload)
                self._placed(session, 0, share, granted[0])

        return _ShareReader(length, take)

    # -- shares

    def _on_event(self, holder: int, event: RankEvent) -> None:
        """Take what a rank elsewhere says."""
        session = self._sessions.get(event.session)
        if isinstance(event, SessionBroke):
            if session is not None:
                self._end(session)
            return
        assert self._ranks is not None, "events come from ranks"
        granted = None if session is None else self._destination(session, holder, event)
        if session is None or granted is None:
            self._ranks.drop_share(holder, event.staged)
            return
        ref, block = granted
        (held,) = self._holders[holder]
        pieces = tuple(within(piece, held) for piece in session.routes[event.source, holder])
        self._ranks.place_share(holder, event.staged, block, pieces)
        self._placed(session, holder, event, ref)

    def _destination(
        self, session: _Session, holder: int, share: ArrivedShare
    ) -> tuple[GrantRef, int] | None:
        """Return grant and block of a share, None if it is stale or damaged. Its sender may send another."""
        if session.control is not None:
            session.control.acknowledge(1)
        writer, hooks, pair = session.writer, self._hooks, (share.source, holder)
        ref = hooks.resolve(writer, share.slot, share.generation)
        blocks = None if ref is None else hooks.destinations(writer, ref, range(share.index, share.index + 1))
        if ref is None or not blocks:
            return None
        length = pieces_bytes(self._memory.layout, session.routes.get(pair, ()))
        if share.length != length or share.digest != share_digest(ref, share.index, *pair, share.hashed):
            hooks.corrupt(writer, ref)
            return None
        return ref, blocks[0]

    def _placed(self, session: _Session, holder: int, share: ArrivedShare, ref: GrantRef) -> None:
        """Record a share that was written, and the block's arrival with the last one."""
        digest = session.place(ref, share.index, (share.source, holder), share.digest)
        if digest is not None:
            self._hooks.arrived(session.writer, ref, share.index, [digest])


def _end_of(session: int, source: int) -> WriterId:
    """Return the name of a sender's socket at this process' listener."""
    return WriterId(str(source), session)


class _ShareReader:
    """Reader of the frames of one rank, whose shares have `length` bytes."""

    def __init__(self, length: int, take: Callable[[int, int, int, bytes, memoryview], None]) -> None:
        self._take = take
        self._header = memoryview(bytearray(HEADER.size))
        self._payload = memoryview(bytearray(length))
        self._frame: tuple[int, int, int, bytes] | None = None

    def greeting(self) -> bytes:
        return ACCEPTED

    def first_buffer(self) -> memoryview:
        return self._header

    def buffer_filled(self) -> memoryview:
        if self._frame is None:
            slot, generation, index, length, digest = HEADER.unpack(self._header)
            if length != self._payload.nbytes or not length:
                raise TransportError(f"a data connection sent a share of {length} bytes")
            self._frame = (slot, generation, index, digest)
            return self._payload
        frame, self._frame = self._frame, None
        self._take(*frame, self._payload)
        return self._header

    def ended(self) -> None:
        """Do nothing: shares that were not placed yet never will be."""
