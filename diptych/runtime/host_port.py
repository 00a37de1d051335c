"""Addresses as HOST:PORT."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError("must be HOST:PORT")
    if host in ("0.0.0.0", "::"):  # refused, not listened on
        raise ValueError("must be an address that other hosts reach")
    return host, int(port)
