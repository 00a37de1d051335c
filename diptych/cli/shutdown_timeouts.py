"""How long stopping may take, as the programs were told by flags, variables and --set."""

from collections.abc import Iterable
from dataclasses import dataclass

from diptych.runtime.settings import ProgramSettings
from diptych.worker_process.config import WorkerSettings
from gateway.config import GatewaySettings

_LEAVING_S = 2.0  # in which what did not finish is told so, and the process ends by itself


@dataclass(frozen=True)
class DrainTimes:
    """In seconds.

    Args:
        requests_s: that running requests get.
        patience_s: from SIGTERM to SIGKILL, for any process.
    """

    requests_s: float
    patience_s: float


def drain_times(settings: Iterable[ProgramSettings]) -> DrainTimes:
    """Of a system with these programs."""
    requests_s = longest_s = 0.0
    for one in settings:
        if isinstance(one, GatewaySettings):
            requests_s = max(requests_s, one.drain_grace_s)
            longest_s = max(longest_s, one.drain_settle_s + one.drain_grace_s)
        elif isinstance(one, WorkerSettings):
            longest_s = max(longest_s, one.drain_s)
    return DrainTimes(requests_s, longest_s + _LEAVING_S)
