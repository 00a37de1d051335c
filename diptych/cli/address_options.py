"""Options and checks of commands that talk to a running gateway."""

from __future__ import annotations

from typing import Annotated, TypeVar

import typer

from gateway.ports import GRPC_PORT, admin_port_beside

ADMIN_PORT = admin_port_beside(GRPC_PORT, None)
Text = TypeVar("Text", str, list[str], None)


def target(address: str) -> str:
    """Return the address. Refuses a URL, which gRPC would take for a host name."""
    if address.startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise typer.BadParameter("is host:port, without a scheme; DIPTYCH_CA_FILE turns TLS on")
    return address


def utf8(given: Text) -> Text:
    """Return the text. Refuses what is not UTF-8 by the option's name: gRPC sends UTF-8."""
    try:
        "".join(given or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("is not UTF-8") from None
    return given


AdminAddress = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="DIPTYCH_ADMIN_ADDRESS",
        callback=target,
        help="host:port of a gateway's admin port.",
    ),
]
