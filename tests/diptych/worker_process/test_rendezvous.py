"""Ranks of other hosts join with four connections and the secret, or are refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from diptych.engine.parallel.communicator import GroupBroken
from diptych.runtime.host_port import parse_address
from diptych.worker_process.group import rendezvous
from diptych.worker_process.group.rank_key import BadRankKey, read_rank_key
from diptych.worker_process.group.rendezvous import KINDS, Joined, NotAdmitted, Rendezvous
from diptych.worker_process.group.same_files import files_digest

HOST, KEY = "127.0.0.1", b"sixteen bytes, or more"


@pytest.fixture
def meeting() -> Rendezvous:
    """A rendezvous at a free port."""
    return Rendezvous(HOST, 0, KEY)


def accepting(
    meeting: Rendezvous, count: int, timeout_s: float = 30
) -> tuple[threading.Thread, list[Joined]]:
    found: list[Joined] = []
    thread = threading.Thread(target=lambda: found.extend(meeting.accept(count, timeout_s)))
    thread.start()
    return thread, found


def test_a_rank_joins_with_all_its_connections(meeting: Rendezvous) -> None:
    thread, found = accepting(meeting, 1)
    ends = rendezvous.join(HOST, meeting.port, KEY)
    thread.join()
    (joined,) = found
    assert joined.host == HOST
    for kind in KINDS:
        ends[kind].send(kind)
        assert joined.ends[kind].recv() == kind


def test_another_secret_is_refused_at_both_ends_and_nothing_is_unpickled(meeting: Rendezvous) -> None:
    thread, found = accepting(meeting, 1)
    with pytest.raises(NotAdmitted, match="another secret"):
        rendezvous.join(HOST, meeting.port, b"another secret altogether")
    assert not found
    ends = rendezvous.join(HOST, meeting.port, KEY)  # who has it is still let in
    thread.join()
    assert len(found) == 1
    ends["life"].close()


@pytest.mark.parametrize("says", ["a byte at a time", "no greeting"])
def test_who_stalls_keeps_rank_0_no_longer_than_the_time_of_a_handshake(
    meeting: Rendezvous, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 1.0)
    connection = socket.create_connection((HOST, meeting.port))
    over = threading.Event()
    said: list[bytes] = []

    def stall() -> None:
        with contextlib.suppress(OSError):
            if says == "no greeting":
                kept = rendezvous._open(connection, KEY, b"rank", b"rank-0")
                over.wait()
                kept.close()
            while not over.wait(0.2):
                connection.sendall(b"x")
                said.append(b"x")

    thread = threading.Thread(target=stall)
    thread.start()
    with pytest.raises(GroupBroken, match="0 of 1 ranks"):
        meeting.accept(1, 0.1)
    over.set()
    thread.join()
    connection.close()
    assert len(said) < 64, "a nonce and a proof, each byte of which came in time"


def test_a_rank_that_died_while_others_joined_is_not_counted(meeting: Rendezvous) -> None:
    thread, found = accepting(meeting, 2)
    for end in rendezvous.join(HOST, meeting.port, KEY).values():
        end.close()
    kept = [rendezvous.join(HOST, meeting.port, KEY) for _ in range(2)]
    thread.join()
    for ends, joined in zip(kept, found, strict=True):
        ends["plans"].send("here")
        assert joined.ends["plans"].recv() == "here"


def test_silent_connections_keep_no_rank_out(meeting: Rendezvous) -> None:
    """Nor do more of them than there are handshakes at once: the oldest one ends."""
    thread, found = accepting(meeting, 1, timeout_s=60)
    silent = [socket.create_connection((HOST, meeting.port)) for _ in range(rendezvous.MAX_HANDSHAKES + 1)]
    silent[0].settimeout(60)
    while silent[0].recv(64):
        pass  # its nonce; then it is ended
    ends = rendezvous.join(HOST, meeting.port, KEY)
    thread.join()
    assert len(found) == 1
    for end in (*silent, *ends.values()):
        end.close()


def test_too_few_ranks_are_an_error_that_counts_them(meeting: Rendezvous) -> None:
    with pytest.raises(GroupBroken, match=r"0 of 2 ranks of other hosts joined at 127\.0\.0\.1:\d+"):
        meeting.accept(2, 0.2)
    with pytest.raises(ConnectionRefusedError):  # it listens no more
        socket.create_connection((HOST, meeting.port), timeout=5)


@pytest.mark.parametrize("text", ["10.0.0.1", ":700", "host:0", "host:70000", "host:x", "0.0.0.0:7000", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_address(text)


def test_addresses_are_host_and_port() -> None:
    assert parse_address("ranks.example:7000") == ("ranks.example", 7000)
    assert parse_address("[fd00::1]:7000") == ("fd00::1", 7000)


def test_a_key_file_holds_enough_bytes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(BadRankKey, match="No such file"):
        read_rank_key(file)
    file.write_text("short\n")
    with pytest.raises(BadRankKey, match="5 bytes"):
        read_rank_key(file)
    file.write_bytes(KEY + b"\n")
    assert read_rank_key(file) == KEY


def test_the_digest_of_files_knows_another_model_and_no_names(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, weight, name in zip(folders, (b"1", b"1", b"2"), ("x", "y", "x"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / f"{name}.safetensors").write_bytes(bytes(3 << 20) + weight)
    first, renamed, other = map(files_digest, folders)
    assert first == renamed
    assert first != other
