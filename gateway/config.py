"""Settings of the gateway."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diptych.runtime.settings import Port, ProgramSettings
from diptych.runtime.tls import TlsFiles, require_readable
from gateway.access.key_file import read_key_file
from gateway.session.retry_policy import WORKER_WAIT_S

GRPC_PORT = 50051
HTTP_PORT = 8000


def admin_port_beside(grpc_port: int, chosen: int | None) -> int:
    """Return the admin port: ``chosen``, else the public one + 1; 0 (any) if that is 0 or the last."""
    if chosen is not None:
        return chosen
    return grpc_port + 1 if 0 < grpc_port < 65535 else 0


def port_clash(grpc_port: int, http_port: int, admin_port: int | None) -> str | None:
    """Return why these cannot be the ports of one gateway, or None.

    A gateway can share its ports with its successor. A port shared with itself would raise no error, and one
    of its servers would get no call.
    """
    admin = admin_port_beside(grpc_port, admin_port)
    name = (
        "--admin-port"
        if admin_port is not None
        else "the admin port (the gRPC port + 1 unless --admin-port says)"
    )
    ports = (("--grpc-port", grpc_port), ("--http-port", http_port), (name, admin))
    for (one, port), (other, other_port) in itertools.combinations(ports, 2):
        if port == other_port != 0:
            return f"{one} and {other} are both {port}: each needs a port of its own"
    return None


class GatewaySettings(ProgramSettings):
    """Public gateway: inference by gRPC and by OpenAI's API over HTTP, an admin port for operators."""

    program: ClassVar[str] = "gateway"

    grpc_port: Port = Field(GRPC_PORT, description="public gRPC port; 0 = any free one")
    http_port: Port = Field(
        HTTP_PORT, description="port of OpenAI's API, /metrics, /health and /ready; 0 = any free one"
    )
    admin_port: Port | None = Field(
        None, description="gRPC port of the AdminService, for operators; default: the public one + 1; 0 = any"
    )
    api_keys_file: Path | None = Field(
        None, description="API keys, as `diptych key new` writes them; without it no key is required"
    )
    tls_cert: Path | None = Field(
        None, description="PEM certificate chain of the gRPC, HTTP and admin ports; read again when renewed"
    )
    tls_key: Path | None = Field(None, validate_default=True, description="PEM key of --tls-cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM certificates of the CA of clients; then clients need a certificate"
    )
    max_inflight: Annotated[int, Field(ge=1, le=65536)] = Field(
        256, description="requests that may be with the workers at once; more wait here"
    )
    max_queued_tokens: Annotated[int, Field(ge=1)] = Field(
        400_000,
        description="prompt tokens that may wait for prefill; beyond, requests are refused of those tenants "
        "that have more than an equal share of them",
    )
    max_queue_delay_s: Literal["auto"] | Annotated[float, Field(gt=0, le=3600)] = Field(
        120.0,
        description="refuse a request whose prefill would begin later than this, as predicted; "
        "auto = four times what the prefill of an average request takes",
    )
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        60.0,
        description="seconds in which a client must take a message of its stream; then the stream ends with "
        "ABORTED and SLOW_READER",
    )
    stream_buffer_mib: Annotated[int, Field(ge=1, le=65536)] = Field(
        64, description="MiB of output that may wait for one stream's reader; beyond, it ends likewise"
    )
    total_stream_buffer_mib: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        256,
        description="MiB of output that may wait for all streams' readers; beyond, the stream with most ends",
    )
    share_ports: bool = Field(
        False, description="let a successor listen on the same ports before this gateway has ended"
    )
    metrics_compat: Literal["none", "vllm"] = Field(
        "none", description="offer the figures under another server's names as well, for its dashboards"
    )
    await_workers_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0, description="seconds to wait for workers before opening the ports; then they open anyway"
    )
    drain_settle_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="seconds from NOT_SERVING to refusing new requests at shutdown"
    )
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        10.0, description="seconds that running requests get to finish at shutdown"
    )

    recovery_wait_s: Annotated[float, Field(ge=0, le=600)] = Field(
        WORKER_WAIT_S,
        description="seconds that a request which lost its worker waits for another one to come",
    )

    @field_validator("api_keys_file")
    @classmethod
    def _keys_can_be_read(cls, path: Path | None) -> Path | None:
        if path is not None:
            read_key_file(path)
        return path

    @field_validator("tls_cert")
    @classmethod
    def _certificate_can_be_read(cls, path: Path | None) -> Path | None:
        if path is not None:
            require_readable(path)
        return path

    @field_validator("tls_key")
    @classmethod
    def _certificate_and_key(cls, key: Path | None, others: ValidationInfo) -> Path | None:
        if "tls_cert" not in others.data:
            return key  # reported already
        certificate = others.data.get("tls_cert")
        if (certificate is None) != (key is None):
            raise ValueError("goes with --tls-cert: give both or neither")
        if certificate is not None and key is not None:
            TlsFiles(certificate, key).check()
        return key

    @field_validator("tls_client_ca")
    @classmethod
    def _clients_need_tls(cls, client_ca: Path | None, others: ValidationInfo) -> Path | None:
        if not {"tls_cert", "tls_key"} <= others.data.keys():
            return client_ca  # reported already
        certificate, key = others.data.get("tls_cert"), others.data.get("tls_key")
        if client_ca is not None and (certificate is None or key is None):
            raise ValueError("goes with --tls-cert and --tls-key")
        if certificate is not None and key is not None:
            TlsFiles(certificate, key, client_ca).check()
        return client_ca

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if clash := port_clash(self.grpc_port, self.http_port, self.admin_port):
            raise ValueError(clash)
        return self

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def resolved_admin_port(self) -> int:
        return admin_port_beside(self.grpc_port, self.admin_port)
