"""TLS on the ports of a real gateway: accepted and refused connections, renewal of a certificate."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import trustme

from diptych.cli.http_probe import http_status
from diptych.client import AsyncClient, CallFailed
from diptych.client.credentials import Access, tls_credentials
from diptych.v1 import admin_pb2, admin_pb2_grpc
from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

OUTPUT = [10, 11, 12]


class Files:
    """A CA of our own and what it signed, as PEM files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.cert, self.key, self.roots = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
        self.ca.cert_pem.write_to_path(self.roots)
        self.issue()

    def issue(self) -> None:
        """Issue a new certificate of the server, in place of the last."""
        leaf = self.ca.issue_cert("127.0.0.1", "localhost")
        self.key.touch(0o600)
        leaf.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))

    def client(self, ca: trustme.CA) -> tuple[Path, Path]:
        leaf = ca.issue_cert("client@example.org")
        cert, key = self.folder / "client.pem", self.folder / "client.key"
        leaf.cert_chain_pems[0].write_to_path(cert)
        leaf.private_key_pem.write_to_path(key)
        return cert, key

    @property
    def settings(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key}

    def context(self, cert: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.roots)
        if cert is not None:
            context.load_cert_chain(*cert)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def serving(model: ServedModel, redis_url: str, **settings: Any) -> Any:
    return running(model, redis_url, ScriptedPrefill(), ScriptedDecode(answering(OUTPUT)), **settings)


def address(stack: Stack) -> str:
    return f"127.0.0.1:{stack.gateway.grpc_port}"


async def get(stack: Stack, path: str, context: ssl.SSLContext, **headers: str) -> int:
    url = f"https://127.0.0.1:{stack.gateway.http_port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, ssl=context, headers=headers) as answer,
    ):
        return answer.status


async def failure(client: AsyncClient) -> grpc.StatusCode:
    with pytest.raises(CallFailed) as caught:
        await client.models(timeout_s=10)
    return caught.value.code


async def test_client_with_a_key_calls_over_tls(
    bundled: ServedModel, redis_url: str, files: Files, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    key, operator = keys.add("acme"), keys.add("ops", "admin")
    async with serving(bundled, redis_url, **files.settings, api_keys_file=keys.path) as stack:
        async with AsyncClient(address(stack), api_key=key, tls=files.roots) as client:
            assert (await client.generate("Hello", max_tokens=3)).usage.completion_tokens == 3
            async with client.stream("Hello", max_tokens=3) as stream:
                assert [chunk async for chunk in stream]
            async with client.stream("Hello", max_tokens=3, resume=True) as stream:
                assert [chunk async for chunk in stream]
            assert (await client.tokenize("Hello")).ids
            assert not await client.cancel("nothing")
        async with AsyncClient(address(stack), tls=files.roots) as client:
            assert await failure(client) is grpc.StatusCode.UNAUTHENTICATED
        for tls in (False, True):  # the public roots know nothing of ours
            async with AsyncClient(address(stack), api_key=key, tls=tls, retries=0) as client:
                assert await failure(client) is grpc.StatusCode.UNAVAILABLE
        assert await get(stack, "/v1/models", files.context(), Authorization=f"Bearer {key}") == 200
        assert await get(stack, "/v1/models", files.context()) == 401
        port = stack.gateway.http_port
        assert await http_status("127.0.0.1", port, "/ready", tls=True) == 200
        assert await http_status("127.0.0.1", port, "/ready") != 200
        worker_id = stack.core.worker_pool.registry.linked()[0].record.worker_id
        for name, status in ((worker_id, 200), ("unknown", 503)):
            assert await http_status("127.0.0.1", port, f"/ready?worker={name}", tls=True) == status
        access = Access(operator, tls_credentials(files.roots))
        async with access.aio_channel(f"127.0.0.1:{stack.gateway.admin_port}") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            listed = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=access.metadata)
            assert len(listed.workers) == 2


async def test_client_ca_requires_certificates_of_clients_not_of_probes(
    bundled: ServedModel, redis_url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bundled, redis_url, **files.settings, tls_client_ca=files.roots) as stack:
        async with AsyncClient(address(stack), tls=files.roots, retries=0) as client:
            assert await failure(client) is grpc.StatusCode.UNAVAILABLE
        assert await get(stack, "/health", files.context()) == 200
        assert await http_status("127.0.0.1", stack.gateway.http_port, "/ready", tls=True) == 200
        assert await get(stack, "/v1/models", files.context()) == 403
        certificate = files.client(files.ca)
        for name, path in zip(("CA", "CLIENT_CERT", "CLIENT_KEY"), (files.roots, *certificate), strict=True):
            monkeypatch.setenv(f"DIPTYCH_{name}_FILE", str(path))
        access = Access.from_environment()
        async with AsyncClient(address(stack), credentials=access.credentials) as client:
            assert await client.models()
        assert await get(stack, "/v1/models", files.context(certificate)) == 200
        stranger = files.client(trustme.CA())
        with pytest.raises(aiohttp.ClientError):
            await get(stack, "/v1/models", files.context(stranger))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("CA", "CLIENT_CERT"), "go together"),
        (("CA", "CLIENT_KEY"), "go together"),
        (("CLIENT_CERT", "CLIENT_KEY"), "DIPTYCH_CA_FILE"),
    ],
)
def test_incomplete_client_tls_is_reported(
    files: Files, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], words: str
) -> None:
    """gRPC's core ends the process over a certificate without a key."""
    paths = dict(zip(("CLIENT_CERT", "CLIENT_KEY"), files.client(files.ca), strict=True))
    for name in given:
        monkeypatch.setenv(f"DIPTYCH_{name}_FILE", str(paths.get(name, files.roots)))
    with pytest.raises(OSError, match=words):
        Access.from_environment()


def served_by(port: int, files: Files) -> str:
    """Return the certificate of a new connection."""
    return ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(files.roots), timeout=60)


async def test_renewed_certificate_is_served_without_a_restart(
    bundled: ServedModel, redis_url: str, files: Files
) -> None:
    async with serving(bundled, redis_url, **files.settings) as stack:
        ports = stack.gateway.grpc_port, stack.gateway.http_port, stack.gateway.admin_port
        first = [await asyncio.to_thread(served_by, port, files) for port in ports]
        assert len(set(first)) == 1
        async with AsyncClient(address(stack), tls=files.roots) as client:
            before = await client.models()
            files.issue()
            second = first
            async with asyncio.timeout(60):
                while any(one == first[0] for one in second):
                    await asyncio.sleep(0.2)
                    second = [await asyncio.to_thread(served_by, port, files) for port in ports]
            assert len(set(second)) == 1
            assert await client.models() == before  # over the connection that there was
            files.cert.write_text("half a certificate")
            await asyncio.sleep(1.2)
            assert [await asyncio.to_thread(served_by, port, files) for port in ports] == second


async def test_tls_allows_any_bind_address(bundled: ServedModel, redis_url: str, files: Files) -> None:
    """Bind any address; refused without TLS in tests/diptych/runtime/test_rpc.py and test_http_edge.py."""
    async with (
        serving(bundled, redis_url, host="0.0.0.0", **files.settings) as stack,
        AsyncClient(address(stack), tls=files.roots) as client,
    ):
        assert await client.models()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tls-cert", "{cert}"], "--tls-key"),
        (["--tls-key", "{key}"], "--tls-key"),
        (["--tls-client-ca", "{roots}"], "--tls-client-ca"),
        (["--tls-cert", "{cert}", "--tls-key", "{cert}"], "can be read by every user"),
        (["--tls-cert", "{cert}", "--tls-key", "{other}"], "are not a certificate and its key"),
        (["--tls-cert", "{cert}", "--tls-key", "{missing}"], "--tls-key (DIPTYCH_TLS_KEY): cannot read /no:"),
        (
            ["--tls-cert", "{missing}", "--tls-key", "{key}"],
            "--tls-cert (DIPTYCH_TLS_CERT): cannot read /no:",
        ),
        (
            ["--tls-cert", "{cert}", "--tls-key", "{key}", "--tls-client-ca", "{folder}"],
            "--tls-client-ca (DIPTYCH_TLS_CLIENT_CA): cannot read {folder}: Is a directory",
        ),
        (["--tls-cert", "{missing}", "--tls-client-ca", "{roots}", "--tls-key", "{key}"], "cannot read /no:"),
        (["--tls-cert", "{cert}", "--tls-key", "{key}", "--tls-client-ca", "{key}"], "--tls-client-ca"),
    ],
)
def test_unusable_tls_files_are_refused(
    files: Files, tmp_path: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pem"
    other.touch(0o600)
    trustme.CA().issue_cert("a").private_key_pem.write_to_path(other)
    paths = {"cert": files.cert, "key": files.key, "roots": files.roots, "other": other, "missing": "/no"}
    paths["folder"] = tmp_path
    with pytest.raises(SystemExit) as caught:
        GatewaySettings.from_argv([flag.format(**paths) for flag in flags])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told.format(**paths) in line
