"""Which processes can share memory: same kernel, same pid and network namespaces."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def host_id() -> str:
    """Equal for two processes exactly if pids and abstract sockets of one mean the same to the other.

    Containers of one machine differ unless they share those namespaces; they then talk by tcp.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
    return hashlib.sha256("|".join([boot, *spaces]).encode()).hexdigest()[:32]
