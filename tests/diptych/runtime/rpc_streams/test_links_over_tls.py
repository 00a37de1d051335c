"""Links with certificates: who is let in, by which name, and what a renewal changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from diptych.runtime.internal_tls import AUTHORITY, InternalTls, name_of
from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.stream import LinkService, Stream, StreamLost
from diptych.runtime.tls import BadTlsFiles
from diptych.worker.v1 import decode_pb2, work_pb2
from tests.diptych.runtime.authority import Authority

RENEWED_S = 1.2  # files are looked at once a second
HELLO = decode_pb2.DecodeServiceLinkRequest(heartbeat=work_pb2.Heartbeat(progress=7))


async def echo(stream: Stream) -> None:
    while (message := await stream.read()) is not None:
        hello = work_pb2.WorkerHello(worker_id="d", incarnation=message.heartbeat.progress)
        await stream.write(decode_pb2.DecodeServiceLinkResponse(hello=hello))


@asynccontextmanager
async def decode_worker(tls: InternalTls | None) -> AsyncIterator[str]:
    """Address of a process that serves gateways' links."""
    server = make_server(internal=True)
    add_links(server, [LinkService(DECODE, echo)], authenticated=tls is not None)
    credentials = None if tls is None else tls.server_credentials()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, False, credentials)}"
    await server.start()
    yield address
    await server.stop(None)


async def answer(address: str, tls: InternalTls | None) -> int:
    stream = await open_link(address, DECODE, tls)
    try:
        async with asyncio.timeout(20):
            await stream.write(HELLO)
            message = await stream.read()
        return message.hello.incarnation
    finally:
        await stream.close()


async def refusal(address: str, tls: InternalTls | None) -> StreamLost:
    with pytest.raises(StreamLost) as caught:
        await answer(address, tls)
    return caught.value


@pytest.fixture
def ours() -> Authority:
    return Authority()


async def test_a_gateway_and_a_worker_of_one_ca_answer_each_other(ours: Authority, tmp_path: Path) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    async with decode_worker(InternalTls(ours.issue(tmp_path / "d", "decode"), "decode")) as address:
        assert await answer(address, gateway) == 7


async def test_a_worker_of_another_ca_is_refused(ours: Authority, tmp_path: Path) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    strange = InternalTls(Authority().issue(tmp_path / "s", "decode"), "decode")
    async with decode_worker(strange) as address:
        lost = await refusal(address, gateway)
    assert lost.code is grpc.StatusCode.UNAUTHENTICATED
    assert "its certificate is not one that our ca.crt signed" in lost.details


async def test_a_worker_with_another_roles_certificate_is_refused(ours: Authority, tmp_path: Path) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    prefill = InternalTls(ours.issue(tmp_path / "p", "prefill"), "prefill")
    async with decode_worker(prefill) as address:
        lost = await refusal(address, gateway)
    assert lost.code is grpc.StatusCode.UNAUTHENTICATED
    assert "another role" in lost.details


async def test_a_worker_without_tls_is_refused_by_a_gateway_with_it(ours: Authority, tmp_path: Path) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    async with decode_worker(None) as address:
        assert "lacks --internal-tls" in (await refusal(address, gateway)).details


async def test_callers_of_another_ca_or_without_a_certificate_are_refused(
    ours: Authority, tmp_path: Path
) -> None:
    intruder = InternalTls(Authority().issue(tmp_path / "s", "gateway"), "gateway")
    # It trusts the worker; the worker does not trust it.
    intruder._material = replace(intruder._material, authority=ours.ca.cert_pem.bytes())
    async with decode_worker(InternalTls(ours.issue(tmp_path / "d", "decode"), "decode")) as address:
        await refusal(address, intruder)
        await refusal(address, None)


async def test_a_caller_of_the_wrong_role_is_refused_by_name(
    ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = InternalTls(ours.issue(tmp_path / "p", "prefill"), "prefill")
    async with decode_worker(InternalTls(ours.issue(tmp_path / "d", "decode"), "decode")) as address:
        with caplog.at_level(logging.WARNING):
            lost = await refusal(address, prefill)
            await refusal(address, prefill)
    assert lost.code is grpc.StatusCode.PERMISSION_DENIED
    assert f"names {name_of('prefill')}, and not {name_of('gateway')}" in lost.details
    told = [record for record in caplog.records if "refuses" in record.message]
    assert len(told) == 1, "once, not at every try"


async def test_renewed_files_serve_new_links_and_old_ones_stay(ours: Authority, tmp_path: Path) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    async with decode_worker(InternalTls(ours.issue(tmp_path / "d", "decode"), "decode")) as address:
        old = await open_link(address, DECODE, gateway)
        await old.write(HELLO)
        assert (await old.read()).hello.incarnation == 7
        fresh = Authority()
        fresh.issue(tmp_path / "d", "decode")
        await asyncio.sleep(RENEWED_S)
        assert "not one that our ca.crt signed" in (await refusal(address, gateway)).details, (
            "control: the worker's certificate is another one"
        )
        fresh.issue(tmp_path / "g", "gateway")
        await asyncio.sleep(RENEWED_S)
        assert await answer(address, gateway) == 7
        await old.write(HELLO)
        assert (await old.read()).hello.incarnation == 7
        await old.close()


@pytest.mark.parametrize("end", ["g", "d"])
async def test_a_renewal_that_no_peer_would_take_changes_nothing_at_either_end(
    end: str, ours: Authority, tmp_path: Path
) -> None:
    gateway = InternalTls(ours.issue(tmp_path / "g", "gateway"), "gateway")
    async with decode_worker(InternalTls(ours.issue(tmp_path / "d", "decode"), "decode")) as address:
        Authority().issue(tmp_path / end, "prefill")
        await asyncio.sleep(RENEWED_S)
        assert await answer(address, gateway) == 7


@pytest.mark.parametrize("fault", ["role", "authority", "missing"])
def test_files_that_no_peer_would_take_are_refused_at_the_start(
    fault: str, ours: Authority, tmp_path: Path
) -> None:
    folder = ours.issue(tmp_path / "f", "prefill" if fault == "role" else "decode")
    if fault == "authority":
        Authority().ca.cert_pem.write_to_path(folder / AUTHORITY)
    elif fault == "missing":
        (folder / AUTHORITY).unlink()
    with pytest.raises(BadTlsFiles, match=str(folder)):
        InternalTls(folder, "decode")
