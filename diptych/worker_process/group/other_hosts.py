"""The ranks of other hosts that a worker's settings ask for."""

from __future__ import annotations

from diptych.runtime.host_port import parse_address
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.group.rank_group import OtherHosts, RankCannotStart
from diptych.worker_process.group.rank_key import read_rank_key
from diptych.worker_process.group.rendezvous import Rendezvous


def other_hosts(settings: WorkerSettings) -> OtherHosts | None:
    """Listen for the ranks of other hosts, if there are any. Raises RankCannotStart, BadRankKey."""
    if not settings.remote_ranks or settings.rank_key_file is None:
        return None
    key = read_rank_key(settings.rank_key_file)
    try:
        meeting = Rendezvous(*parse_address(settings.rendezvous), key)
    except OSError as error:
        raise RankCannotStart(f"--rendezvous {settings.rendezvous}: {error.strerror}") from error
    return OtherHosts(settings.remote_ranks, meeting)
