"""`rediss://`: the directory over TLS, with the certificates of the server and of its clients checked."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from diptych.runtime.discovery.mirror import DirectoryMirror
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import gateway_api, post


class Authority:
    """A certificate authority whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca = trustme.CA()
        self.roots = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.roots)
        self._folder = folder

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return the files of a certificate for `name` and of its key."""
        made = self.ca.issue_cert(name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(certificate)
        made.private_key_pem.write_to_path(key)
        return certificate, key


@contextlib.asynccontextmanager
async def tls_in_front(redis_url: str, authority: Authority, *, mutual: bool) -> AsyncIterator[int]:
    """Yield a port that ends TLS and passes the bytes on to the Redis-protocol server."""
    parts = urlsplit(redis_url)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("127.0.0.1"))
    if mutual:
        context.load_verify_locations(authority.roots)
        context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(copy(reader, behind[1]), copy(behind[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("mutual", [False, True], ids=["server", "mutual"])
async def test_gateway_finds_workers_over_tls(
    bundled: ServedModel, redis_url: str, tmp_path: Path, mutual: bool
) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("gateway")
    async with tls_in_front(redis_url, authority, mutual=mutual) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.roots}"
        if mutual:
            url += f"&ssl_certfile={certificate}&ssl_keyfile={key}"
        async with gateway_api(bundled, url) as (stack, _, _):
            body = {"model": bundled.card.name, "messages": [{"role": "user", "content": "Count:"}]}
            status, _, _ = await post(stack, "/v1/chat/completions", body)
    assert status == 200


async def test_server_or_client_that_nobody_vouches_for_gets_no_connection(
    redis_url: str, tmp_path: Path
) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    async with tls_in_front(redis_url, ours, mutual=True) as port:
        certificate, key = ours.issue("gateway")
        good = f"ssl_ca_certs={ours.roots}&ssl_certfile={certificate}&ssl_keyfile={key}"
        stranger = "&".join(
            f"ssl_{name}={path}"
            for name, path in zip(("certfile", "keyfile"), others.issue("x"), strict=True)
        )
        for query, connects in (
            (good, True),
            (f"ssl_ca_certs={others.roots}&ssl_certfile={certificate}&ssl_keyfile={key}", False),
            (f"ssl_ca_certs={ours.roots}&{stranger}", False),
            (f"ssl_ca_certs={ours.roots}", False),
        ):
            mirror = DirectoryMirror(f"rediss://127.0.0.1:{port}/0?{query}")
            await mirror.start()
            try:
                assert mirror.connected is connects, query
            finally:
                await mirror.close()
