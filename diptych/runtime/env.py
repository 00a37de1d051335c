"""Environment variables that Diptych reads, and those alike that it does not: they do nothing.

A program knows its own settings only, while one environment serves all: so all are named here.
"""

import difflib
import os
import re
from collections.abc import Mapping

from diptych.runtime.flag_names import RENAMED, SYNONYMS
from diptych.runtime.settings_sources import rename_warning

_PREFIX = "DIPTYCH_"

_SETTINGS = """
    ACCESS_LOG ADMIN_PORT ADVERTISE_HOST ALL2ALL_BACKEND ALLOW_IMAGE_URLS API_KEYS_FILE AUTO_ROLES
    AUTO_ROLES_PAUSE_S AWAIT_WORKERS_S BACKEND BATCH_CONCURRENCY BATCH_DIR BATCH_INVARIANT BATCH_KEEP_DAYS
    BATCH_MAX_FILE_MIB BATCH_MAX_TOTAL_MIB BLOCK_SIZE CHAT_TEMPLATE CONFIG_DIGEST CORES_FD CORS_ALLOW_ORIGIN
    DEATH_FD DECODE_PACING DECODE_PACING_MAX DECODE_THREADS DECODE_WORKERS DEVICE DTYPE ENCODE_THREADS
    ENCODE_WORKERS EXPERT_PARALLEL FAIR_SHARES FALLBACK_KEY_FILE FALLBACK_MODEL FALLBACK_URL
    GPU_MEMORY_UTILIZATION GPU_SHARING GRPC_PORT HOME_CORES HOST HOSTED HTTP_PORT IMAGE_BUFFER_MIB
    IMAGE_CACHE_MIB IMAGE_ENCODER IMAGE_MEMORY_MIB IMAGE_URL_TIMEOUT INSECURE INSECURE_KV_NETWORK INTERNAL_TLS
    JWT_AUDIENCE JWT_ISSUER JWT_JWKS JWT_TENANT_CLAIM KV_BLOCKS KV_CACHE_DTYPE KV_EVENTS KV_EVENTS_RANK
    KV_EVENTS_TOPIC KV_MEMORY_MIB KV_TIER LAME_DUCK LENIENT_JSON_SCHEMA LOCAL_PREFILL LOCAL_PREFILL_CHUNK
    LOG_FORMAT LOG_LEVEL LORA MACHINE_CORES MAX_BATCH MAX_BATCH_REQUESTS MAX_FALLBACK_PREFILL_TOKENS
    MAX_IMAGES MAX_IMAGE_MIB MAX_IMAGE_PIXELS MAX_INFLIGHT MAX_LOCAL_PREFILL_TOKENS MAX_LORAS MAX_LORA_RANK
    MAX_MODEL_LEN MAX_QUEUED_TOKENS MAX_QUEUE_DELAY_S METRICS_COMPAT MIN_DECODE_WORKERS MIN_PREFILL_WORKERS
    MMPROJ MODEL MODEL_NAME MODEL_SPLIT OWN_MEMORIES PIPELINE_PARALLEL PREFILL_CHUNK PREFILL_THREADS
    PREFILL_WORKERS PROMPT_GRAPH_TOKENS PULL_PREFIXES QUANTIZATION RANK_KEY_FILE READY_FD REASONING_PARSER
    REDIS_URL REMOTE_RANKS RENDEZVOUS REPLACES REUSE_PORT ROLE_CHANGES SCRATCH_BLOCKS SECRET SERVED_MODEL_NAME
    SHARE_WEIGHTS SHUTDOWN_TIMEOUT SLO_ITL_MS SLO_TTFT_MS SMALL_REQUESTS SPECULATIVE_MAX_STEP_TOKENS
    SPECULATIVE_MODEL SPECULATIVE_TOKENS SPECULATIVE_TREE STREAM_BUFFER_MIB SUM_PARTS TENSOR_PARALLEL THREADS
    TLS_CERT TLS_CLIENT_CA TLS_KEY TOTAL_STREAM_BUFFER_MIB TRANSPORT WEIGHT_HOLDER WINDOW_BLOCKS WORKERS_FD
    WORKER_ID WORKER_RPC WORKER_SHUTDOWN_TIMEOUT WORKER_WAIT_TIMEOUT WRITE_TIMEOUT
"""
_OTHERS = """
    ADDRESS ADMIN_ADDRESS API_KEY CA_FILE CLIENT_CERT_FILE CLIENT_KEY_FILE DECODE_ATTENTION DECODE_CORES DIST
    FAILPOINTS FAILPOINTS_DIR GPU_TUNING GROUP_EXCHANGE INPUT_ROUNDING NATIVE_CACHE NATIVE_LIBRARY
    NATIVE_SANITIZE PREFILL_ATTENTION PREFILL_CORES REQUIRE_CLIENTS TREE
"""
SETTINGS = frozenset(f"{_PREFIX}{name}" for name in _SETTINGS.split())
_OTHER_NAMES = [*_OTHERS.split(), *(name.upper() for name in (*RENAMED, *SYNONYMS))]
KNOWN = SETTINGS | {f"{_PREFIX}{name}" for name in _OTHER_NAMES}

# Kubernetes and Docker put the addresses of services there, also of one that is called `diptych-gateway`.
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_")
_SERVICE_URLS = ("tcp://", "udp://")


def renamed_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable that has a name of the release before."""
    warnings = (
        rename_warning(name.upper().removeprefix(_PREFIX).lower(), value, name.upper())
        for name, value in sorted(environment.items())
        if name.upper().startswith(_PREFIX)
    )
    return [warning for warning in warnings if warning is not None]


def unknown_variables(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a line with the variables that nothing reads, or None. No value is in it: one may be secret."""
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
