"""The variables that Diptych reads, and what to tell of others that begin like them: they do nothing.

A program knows its own settings only, while one environment serves all: so all are named here.
"""

import difflib
import os
import re
from collections.abc import Mapping

_PREFIX = "DIPTYCH_"

_SETTINGS = """
    ADMIN_PORT ADVERTISE_HOST API_KEYS_FILE AWAIT_WORKERS_S BACKEND BLOCK_SIZE CORES_FD DEATH_FD
    DECODE_THREADS DECODE_WORKERS DEVICE DRAIN_GRACE_S DRAIN_S DRAIN_SETTLE_S DTYPE GPU_MEMORY_UTILIZATION
    GRPC_PORT HOME_CORES HOST HTTP_PORT INSECURE ITL_STRETCH ITL_STRETCH_MAX KV_BLOCKS KV_CACHE_DTYPE
    KV_MEMORY_MIB LINKS LOG_LEVEL MACHINE_CORES MAX_BATCH MAX_BATCH_REQUESTS MAX_INFLIGHT
    MAX_QUEUED_TOKENS MAX_QUEUE_DELAY_S METRICS_COMPAT MODEL MODEL_NAME PREFILL_CHUNK PREFILL_THREADS
    PREFILL_WORKERS READY_FD RECOVERY_WAIT_S REDIS_URL REPLACES SCRATCH_BLOCKS SECRET SHARE_PORTS
    SPECULATIVE_STEP_TOKENS SPECULATIVE_TOKENS THREADS TLS_CERT TLS_CLIENT_CA TLS_KEY TRANSPORT WORKER_ID
"""
_OTHERS = """
    ADDRESS ADMIN_ADDRESS API_KEY CA_FILE CLIENT_CERT_FILE CLIENT_KEY_FILE DECODE_CORES DIST FAILPOINTS
    FAILPOINTS_DIR GPU_TUNING NATIVE_CACHE NATIVE_LIBRARY NATIVE_SANITIZE PREFILL_CORES REQUIRE_CLIENTS
    TREE
"""
SETTINGS = frozenset(f"{_PREFIX}{name}" for name in _SETTINGS.split())
KNOWN = SETTINGS | {f"{_PREFIX}{name}" for name in _OTHERS.split()}

# Kubernetes and Docker put the addresses of services there, also of one that is called `diptych-gateway`.
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_")
_SERVICE_URLS = ("tcp://", "udp://")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> str | None:
    """Those that nothing reads, in a line without their values, which may be secret; None: there are none."""
    unknown = sorted(
        name
        for name, value in environment.items()
        if name.upper().startswith(_PREFIX)
        and name.upper() not in KNOWN
        and not (_OF_SERVICES.search(name) or value.startswith(_SERVICE_URLS))
    )
    if not unknown:
        return None
    return f"variables that nothing reads: {', '.join(map(_with_likely, unknown))}"


def _with_likely(name: str) -> str:
    likely = difflib.get_close_matches(name.upper(), KNOWN, n=1, cutoff=0.85)
    return f"{name} ({likely[0]}?)" if likely else name
