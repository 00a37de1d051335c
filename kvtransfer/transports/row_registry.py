"""The ways of rows by name: how their ends are opened (row_channels.py says what they are)."""

from __future__ import annotations

from diptych.runtime.internal_tls import InternalTls
from kvtransfer.transports.base import TransportError, host_id
from kvtransfer.transports.row_channels import (
    OnBroken,
    OnPart,
    RowListener,
    RowReceiver,
    RowsAdmission,
)
from kvtransfer.transports.row_frames import FrameListener, FrameReceiver
from kvtransfer.transports.row_region import RegionListener, open_region


def make_row_listeners(host: str, tls: InternalTls | None) -> list[RowListener]:
    """Return the encode worker's end of each way; `tls` is for what goes over the network."""
    return [RegionListener(host_id()), FrameListener(host, tls)]


async def open_row_receiver(
    name: str, admission: RowsAdmission, item_bytes: int, on_part: OnPart, on_broken: OnBroken
) -> RowReceiver:
    """Register with an encode worker for rows of numbers of `item_bytes` bytes. Raises TransportError.

    Args:
        on_part: gets each part that comes by the way itself, whose bytes are there until it returns.
        on_broken: gets the reason why nothing more comes by it.
    """
    match name:
        case "shared_memory":
            return await open_region(admission, item_bytes)
        case "tcp":
            return await FrameReceiver.open(admission, on_part, on_broken)
    raise TransportError(f"the encode worker chose {name!r} for rows, which is not known here")
