"""Addresses that a process may listen on, and those without encryption."""

import ipaddress

from diptych.runtime.settings import StartupError


class UnsafeBindError(StartupError, ValueError):
    """The address can be reached from other machines and the connection would be in the clear."""


class CannotListen(StartupError, OSError):
    """The port is taken, or the address is none of this machine's."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. Names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, *, encrypted: bool, insecure: bool) -> None:
    """Raise UnsafeBindError unless `host` is loopback, the port speaks TLS, or the operator insists."""
    if not (encrypted or insecure or is_loopback(host)):
        raise UnsafeBindError(
            f"refusing to listen on {host} without TLS: other machines could reach it. "
            "Bind to 127.0.0.1, or pass --insecure where the network itself is trusted."
        )


def join_host_port(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
