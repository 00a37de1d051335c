"""Ports of a gateway: those it has by default, and which cannot go together."""

from __future__ import annotations

import itertools

GRPC_PORT = 50051
HTTP_PORT = 8000


def admin_port_beside(grpc_port: int, chosen: int | None) -> int:
    """Return the admin port: the chosen one, else the public one + 1; 0 (any free one) where that is any, or
    the last.
    """
    if chosen is not None:
        return chosen
    return grpc_port + 1 if 0 < grpc_port < 65535 else 0


def port_clash(grpc_port: int, http_port: int, admin_port: int | None) -> str | None:
    """Return why these cannot be the ports of one gateway, or None: one of them would get no call.

    A gateway shares its ports with its successor, so that it could share one with itself as well, and no
    error would tell.
    """
    admin = admin_port_beside(grpc_port, admin_port)
    admin_flag = (
        "--admin-port"
        if admin_port is not None
        else "the admin port (the gRPC port + 1 unless --admin-port says)"
    )
    ports = (("--grpc-port", grpc_port), ("--http-port", http_port), (admin_flag, admin))
    for (flag, port), (other, its) in itertools.combinations(ports, 2):
        if port == its != 0:
            return f"{flag} and {other} are both {port}: each needs a port of its own"
    return None
