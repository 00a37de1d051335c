"""A whole system as one would put it before the world: TLS, API keys, spans to a collector; all is logged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trustme

from diptych.client import AsyncClient
from diptych.client.credentials import Access, tls_credentials
from tests.diptych.runtime.otlp_collector import OtlpCollector
from tests.end_to_end import tiny_system
from tests.end_to_end.stack import Stack, running_stack
from tests.gateway.access.keys import Keys


@dataclass(frozen=True)
class Secured:
    """``collector`` gets the spans of all processes; ``roots`` is what clients trust."""

    stack: Stack
    keys: Keys
    roots: Path
    collector: OtlpCollector

    def client(self, key: str) -> AsyncClient:
        return AsyncClient(
            self.stack.address, model=tiny_system.MODEL, api_key=key, tls=self.roots, retries=0
        )

    def access(self, key: str) -> Access:
        return Access(key, tls_credentials(self.roots))

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.stack.account['gateway']['http_port']}"


@contextlib.contextmanager
def serving(folder: Path, keys: Keys) -> Iterator[Secured]:
    """The tiny model with one worker of each role and the keys of ``keys``, which has at least one."""
    model = tiny_system.write(folder / "model")
    roots, cert, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(roots)
    leaf.cert_chain_pems[0].write_to_path(cert)
    key.touch(0o600)
    leaf.private_key_pem.write_to_path(key)
    collector = OtlpCollector()
    flags = [
        "--model",
        str(model),
        "--model-name",
        tiny_system.MODEL,
        "--dtype",
        "fp32",
        "--kv-blocks",
        "400",
    ]
    flags += ["--api-keys-file", str(keys.path), "--tls-cert", str(cert), "--tls-key", str(key)]
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    try:
        with running_stack(*flags, "--log-level", "debug", env=env) as stack:
            yield Secured(stack, keys, roots, collector)
    finally:
        collector.stop()
