"""Publisher of KV events against a real ZeroMQ reader: who gets them, what is sent again, who does not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode_worker.kv_events.endpoint import Endpoint, UnsafeEndpoint, parse_endpoint, prepare
from decode_worker.kv_events.events import BlockTokens, removed, stored

pytest.importorskip("msgspec", reason="the extra `dev` has it")
pytest.importorskip("zmq", reason="the extra `dev` has it")
from decode_worker.kv_events import publisher as publisher_module
from decode_worker.kv_events.publisher import EventPublisher, EventsUnusable
from tests.decode_worker.kv_events.vllm_reader import AllBlocksCleared, Reader

KEYS = [number.to_bytes(16, "big") for number in range(1, 9)]


def block(number: int) -> tuple[bytes, BlockTokens]:
    return KEYS[number], BlockTokens(KEYS[number - 1] if number else b"", (number, number))


def event(number: int):  # type: ignore[no-untyped-def]
    key, tokens = block(number)
    return stored([key], [tokens], "GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def endpoint(folder: Path) -> Endpoint:
    return parse_endpoint(f"ipc://{folder}/kv")


@pytest.fixture
def publisher(endpoint: Endpoint) -> Iterator[EventPublisher]:
    made = EventPublisher(endpoint, topic="kv@pod@model", rank=3)
    yield made
    made.close()


def joined(publisher: EventPublisher, reader: Reader) -> None:
    """Publish until the reader hears it: a subscription takes a moment to arrive."""
    deadline = time.monotonic() + 30
    while not reader.read(0.02):
        publisher.publish([removed([], "GPU")])
        assert time.monotonic() < deadline


def await_sent(endpoint: Endpoint, last: int) -> None:
    """Ask anew until the batch `last` is among those that can be asked for: a thread sends them."""
    deadline = time.monotonic() + 30
    while True:
        with Reader(endpoint.address) as reader:
            reader.replay(endpoint.replay_address, 0)
            if last in reader.numbers:
                return
        assert time.monotonic() < deadline, f"{reader.numbers} were sent"


def test_reader_hears_what_is_published_in_order(publisher: EventPublisher, endpoint: Endpoint) -> None:
    with Reader(endpoint.address, topic="kv@") as reader:
        joined(publisher, reader)
        for number in range(4):
            publisher.publish([event(number)])
        reader.until(lambda: reader.held((0, 0, 1, 1, 2, 2, 3, 3)) == 8)
        assert reader.numbers == list(range(reader.numbers[0], reader.numbers[0] + len(reader.numbers)))
        assert {batch.data_parallel_rank for batch in reader.batches} == {3}
        assert abs(reader.batches[-1].ts - time.time()) < 60


def test_reader_that_comes_late_asks_for_all_since_the_start(
    publisher: EventPublisher, endpoint: Endpoint
) -> None:
    for number in range(3):
        publisher.publish([event(number)])
    await_sent(endpoint, 3)
    with Reader(endpoint.address) as reader:
        reader.replay(endpoint.replay_address, 0)
        assert isinstance(reader.batches[0].events[0], AllBlocksCleared)
        assert reader.numbers == [0, 1, 2, 3]
        assert reader.held((0, 0, 1, 1, 2, 2)) == 6


def test_only_the_last_batches_are_kept(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "REPLAYED", 2)
    made = EventPublisher(endpoint, topic="")
    try:
        for number in range(4):
            made.publish([removed(KEYS[number : number + 1], "GPU")])
        await_sent(endpoint, 4)
        with Reader(endpoint.address) as reader:
            reader.replay(endpoint.replay_address, 0)
            assert reader.numbers == [3, 4], "the gap before them tells that there were more"
    finally:
        made.close()


def test_socket_and_its_folder_are_their_owners_alone(publisher: EventPublisher, folder: Path) -> None:
    sockets = sorted(path.name for path in folder.iterdir())
    assert sockets == ["kv", "kv.replay"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    with pytest.raises(UnsafeEndpoint, match="others than its owner"):
        EventPublisher(parse_endpoint(f"ipc://{folder}/other"), topic="")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect(publisher: EventPublisher, endpoint: Endpoint) -> None:
    path = endpoint.address.removeprefix("ipc://")
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def guarded(folder: Path, port: int) -> Endpoint:
    password = folder / "password"
    password.write_text("s3cret\n")
    password.chmod(0o600)
    return parse_endpoint(f"tcp://127.0.0.1:{port}?password-file={password}")


def free_port() -> int:
    for _ in range(50):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)
    raise AssertionError("no two free ports")


@pytest.mark.parametrize(("password", "hears"), [("s3cret", True), ("guess", False), ("", False)])
def test_port_tells_only_those_who_have_the_password(folder: Path, password: str, hears: bool) -> None:
    endpoint = guarded(folder, free_port())
    made = EventPublisher(endpoint, topic="")
    try:
        with Reader(endpoint.address, password=password) as reader:
            if hears:
                joined(made, reader)
                reader.replay(endpoint.replay_address, 0)
                return
            for _ in range(20):
                made.publish([event(0)])
                assert not reader.read(0.05)
            reader._timeout_s = 0.5
            with pytest.raises(AssertionError, match="no replay"):
                reader.replay(endpoint.replay_address, 0)
    finally:
        made.close()


def test_taken_port_is_an_error_that_names_the_flag(folder: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(EventsUnusable, match=r"--kv-events tcp://127\.0\.0\.1"):
            EventPublisher(guarded(folder, port), topic="")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp://0.0.0.0:5557?password-file=/x", "other machines"),
        ("tcp://*:5557?password-file=/x", "other machines"),
        ("tcp://10.0.0.3:5557?password-file=/x", "other machines"),
        ("tcp://127.0.0.1:5557", "needs a password"),
        ("tcp://127.0.0.1:65535?password-file=/x", "no port with one after it"),
        ("ipc://kv", "absolute"),
        ("inproc://kv", "ipc://FILE or tcp://"),
        ("yes", "ipc://FILE or tcp://"),
    ],
)
def test_endpoint_that_others_could_read_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_endpoint(text)


def test_each_worker_of_a_system_has_its_own_endpoint() -> None:
    first, second = (parse_endpoint("tcp://127.0.0.1:5557?password-file=/x", rank) for rank in (0, 1))
    assert (first.address, first.replay_address) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert second.address == "tcp://127.0.0.1:5559"
    assert parse_endpoint("ipc:///run/kv", 1).address == "ipc:///run/kv_dp1"


def test_password_that_others_may_read_or_that_is_empty_is_refused(folder: Path) -> None:
    endpoint = guarded(folder, 5557)
    (folder / "password").chmod(0o640)
    with pytest.raises(UnsafeEndpoint, match="others than its owner"):
        prepare(endpoint)
    (folder / "password").chmod(0o600)
    (folder / "password").write_text("\n")
    with pytest.raises(UnsafeEndpoint, match="is empty"):
        prepare(endpoint)
