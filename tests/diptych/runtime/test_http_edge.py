import asyncio
import contextlib
import importlib.metadata
import json
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from diptych.runtime.bind_address import UnsafeBindError
from diptych.runtime.descriptors import ConnectionLimits
from diptych.runtime.http_edge import HttpEdge


class Edge:
    def __init__(self, edge: HttpEdge) -> None:
        self.edge = edge
        self.ready = False

    async def send(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.edge.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    async def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        return await self.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())


@pytest_asyncio.fixture
async def edge() -> AsyncIterator[Edge]:
    registry = CollectorRegistry()
    Counter("diptych_test", "A counter", registry=registry).inc(3)
    holder: list[Edge] = []
    http = await HttpEdge.start("127.0.0.1", 0, registry=registry, ready=lambda: holder[0].ready)
    holder.append(Edge(http))
    yield holder[0]
    await http.close()


async def test_health_reports_a_stuck_program() -> None:
    alive = True
    ask = {"registry": CollectorRegistry(), "ready": lambda: True, "alive": lambda: alive}
    http = await HttpEdge.start("127.0.0.1", 0, **ask)
    try:
        assert await Edge(http).get("/health") == (200, b"alive\n")
        alive = False
        assert await Edge(http).get("/health") == (503, b"stuck\n")
    finally:
        await http.close()


async def test_ready_reports_the_reason() -> None:
    why = "no decode worker is linked"
    http = await HttpEdge.start(
        "127.0.0.1",
        0,
        registry=CollectorRegistry(),
        ready=lambda: not why,
        why_not_ready=lambda: why,
        gives_work=lambda worker: worker == "a",
    )
    try:
        edge = Edge(http)
        assert await edge.get("/ready") == (503, b"not ready: no decode worker is linked\n")
        assert await edge.get("/ready?worker=a") == (200, b"ready\n")
        assert await edge.get("/ready?worker=b") == (
            503,
            b"not ready: this gateway gives the worker nothing new\n",
        )
        why = ""
        assert await edge.get("/ready") == (200, b"ready\n")
    finally:
        await http.close()


async def test_health_ready_and_metrics(edge: Edge) -> None:
    assert await edge.get("/health") == (200, b"alive\n")
    assert await edge.get("/ready") == (503, b"not ready\n")
    edge.ready = True
    assert (await edge.get("/ready?verbose=1"))[0] == 200
    status, body = await edge.get("/metrics")
    assert status == 200
    assert b"diptych_test_total 3.0" in body


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /nothing HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("GET", 400),
        ("\x00\xff garbage", 400),
    ],
)
async def test_other_requests_get_a_plain_refusal(edge: Edge, request_line: str, status: int) -> None:
    rest = "\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await edge.send((request_line + rest).encode("latin-1")))[0] == status
    assert (await edge.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "said", [b"\x00\xff secret\r\n\r\n", b"GET / HTTP/1.1\r\nsecret\r\n\r\n", b"GET\r\n\r\n"]
)
async def test_a_client_without_http_costs_a_log_line_at_most(
    edge: Edge, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert (await edge.send(said))[0] == 400
    heard = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert len(heard) <= 1
    for record in heard:
        assert record.levelno == logging.INFO
        assert record.exc_info is None
        assert record.getMessage().startswith("127.0.0.1 does not speak HTTP: Bad")
        assert "secret" not in record.getMessage()


async def test_head_has_no_body(edge: Edge) -> None:
    assert await edge.get("/health", "HEAD") == (200, b"")


async def test_too_long_a_head_and_silent_clients_do_no_harm(edge: Edge) -> None:
    _, silent = await asyncio.open_connection("127.0.0.1", edge.edge.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.edge.port)
    writer.write(b"GET /" + b"a" * 100_000)
    with contextlib.suppress(ConnectionResetError):
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.0 400")
    writer.close()
    assert (await edge.get("/health"))[0] == 200
    silent.close()


async def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.runtime.http_edge.IDLE_S", 0.3)
    http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
    closed = asyncio.ensure_future(reader.read())
    for _ in range(20):  # a byte now and then keeps nothing alive
        if not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.1)
    assert closed.done()
    assert closed.exception() is not None or closed.result() == b""
    writer.close()
    await http.close()


async def test_silent_spare_connection_makes_room_for_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ConnectionLimits(http=1, spare=1)
    monkeypatch.setattr("diptych.runtime.http_edge.connection_limits", lambda: few)
    http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True)
    kept = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(2)]
    probe = await asyncio.open_connection("127.0.0.1", http.port)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(kept[1][0].read(), 10) == b""
    probe[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(probe[0].readline(), 10)
    probe[1].close()
    kept[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(kept[0][0].readline(), 2)
    for _, other in kept:
        other.close()
    await http.close()


@pytest_asyncio.fixture
async def full(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edge]:
    """A client has the only connection, and two are to spare. A request to its API gets 418."""
    few = ConnectionLimits(http=1, spare=2)
    monkeypatch.setattr("diptych.runtime.http_edge.connection_limits", lambda: few)
    monkeypatch.setattr("diptych.runtime.http_edge._SPARE_S", 0.5)

    async def api(_: web.BaseRequest) -> web.Response:
        return web.Response(status=418)

    http = await HttpEdge.start(
        "127.0.0.1",
        0,
        registry=CollectorRegistry(),
        ready=lambda: True,
        api=api,
        max_body_bytes=1 << 20,
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(request)
    assert b"418" in await reader.readuntil(b"\r\n\r\n")
    yield Edge(http)
    writer.write(request)  # who came in time is served, whatever comes meanwhile
    assert b"418" in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await http.close()


async def test_probes_are_answered_beyond_the_connections(full: Edge) -> None:
    kept_alive = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
    for path in (b"/health", b"/ready", b"/metrics", b"/version") * 2:
        assert (await full.send(kept_alive % path))[0] == 200  # and the connection ends, or this would hang


async def test_requests_beyond_the_connections_get_retry_after(full: Edge) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", full.edge.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000
    )
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert {b"Retry-After: 1", b"Connection: close"} <= set(head.split(b"\r\n"))
    assert body == b"too many connections\n"
    writer.close()


async def test_a_spare_connection_without_a_request_is_dropped_soon(full: Edge) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", full.edge.port) for _ in range(2)]
    for reader, _ in silent:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
    assert (await full.get("/health"))[0] == 200
    for _, writer in silent:
        writer.close()


async def test_version_has_the_digest_of_the_configuration() -> None:
    http = await HttpEdge.start(
        "127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True, config_digest="1a2b3c4d5e6f"
    )
    try:
        status, body = await Edge(http).get("/version")
    finally:
        await http.close()
    version = importlib.metadata.version("diptych")
    assert (status, json.loads(body)) == (200, {"version": version, "config_digest": "1a2b3c4d5e6f"})


async def test_version_says_what_a_worker_computes() -> None:
    http = await HttpEdge.start(
        "127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True, computes="bf16"
    )
    try:
        _, body = await Edge(http).get("/version")
    finally:
        await http.close()
    assert json.loads(body)["computes"] == "bf16"


async def test_close_ends_open_connections() -> None:
    http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(http.close(), 2)
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()


async def test_addresses_are_guarded() -> None:
    registry = CollectorRegistry()
    with pytest.raises(UnsafeBindError):
        await HttpEdge.start("0.0.0.0", 0, registry=registry, ready=lambda: True)
    first = await HttpEdge.start("127.0.0.1", 0, registry=registry, ready=lambda: True)
    with pytest.raises(OSError, match="in use"):
        await HttpEdge.start("127.0.0.1", first.port, registry=registry, ready=lambda: True)
    await first.close()


async def test_leave_answers_once_more_and_frees_the_port() -> None:
    made = [
        await HttpEdge.start(
            "127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True, share_port=True
        )
    ]
    port = made[0].port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(request)
    assert b"200" in await reader.readline()
    made.append(
        await HttpEdge.start(
            "127.0.0.1", port, registry=CollectorRegistry(), ready=lambda: False, share_port=True
        )
    )
    await made[0].leave()
    successor = Edge(made[1])
    for _ in range(5):
        assert (await successor.get("/ready"))[0] == 503  # never the one that left
    writer.write(request)
    rest = await asyncio.wait_for(reader.read(), 10)  # the second answer, and the end of the connection
    assert rest.count(b"alive") == 2
    writer.close()
    for one in made:
        await one.close()


async def test_leave_marks_the_last_answer_in_its_head() -> None:
    """A stream that began before did not, so that its client may have sent another request by its end."""
    go_on = asyncio.Event()

    async def api(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await go_on.wait()
        await response.write_eof(b"over")
        return response

    http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True, api=api)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"Connection" not in await reader.readuntil(b"\r\n\r\n")
    assert http.next_request_s() == 0
    await http.leave()
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    go_on.set()
    assert b"over" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)
    assert b"Connection: close" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert b"over" in await asyncio.wait_for(reader.read(), 10)
    assert http.next_request_s() == 0, "the connection has ended"
    writer.close()
    await http.close()


async def test_nobody_shares_a_port_unasked(edge: Edge) -> None:
    with pytest.raises(OSError, match="in use"):
        await HttpEdge.start(
            "127.0.0.1", edge.edge.port, registry=CollectorRegistry(), ready=lambda: True, share_port=True
        )
