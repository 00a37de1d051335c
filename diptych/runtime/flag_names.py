"""Other names of settings: those of the release before, which warn, and vLLM's, which do not.

Names are those of fields: `max_batch` for `--max-batch`, `DIPTYCH_MAX_BATCH` and the key `max-batch`.
"""

import re
from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "itl_stretch": "decode_pacing",
    "itl_stretch_max": "decode_pacing_max",
    "drain_grace_s": "shutdown_timeout",
    "drain_s": "worker_shutdown_timeout",
    "drain_settle_s": "lame_duck",
    "links": "worker_rpc",
    "share_ports": "reuse_port",
    "recovery_wait_s": "worker_wait_timeout",
    "speculative_step_tokens": "speculative_max_step_tokens",
}
"""Gone in the release after the next."""

SYNONYMS: Mapping[str, str] = {
    "max_num_batched_tokens": "prefill_chunk",
    "max_num_seqs": "max_batch",
    "num_gpu_blocks_override": "kv_blocks",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "enable_expert_parallel": "expert_parallel",
    "encode": "encode_workers",
    "kv_cache_memory": "kv_memory_mib",
    "kv_cache_memory_bytes": "kv_memory_mib",
}
"""vLLM's names, and short ones. Its memory is in bytes, ours in MiB: `canonical` converts them."""

QUANTIZATIONS = ("int8", "gguf")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)(?:i?[bB])?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def canonical(name: str, text: str) -> tuple[str, str]:
    """Return the field that a setting called `name` sets, and its value.

    Raises ValueError for an amount of memory that is none.
    """
    if name.startswith("kv_cache_memory"):
        return "kv_memory_mib", str(_mebibytes(text))
    if name == "dtype" and text in QUANTIZATIONS:
        return "quantization", text
    return target(name), text


def target(field: str) -> str:
    """Return the field that a name of any age or origin sets."""
    return SYNONYMS.get(field) or RENAMED.get(field, field)


def names_of(field: str) -> tuple[str, ...]:
    """Return every name of a field, its own first."""
    others = (name for table in (RENAMED, SYNONYMS) for name, its in table.items() if its == field)
    return (field, *others)


def renamed(field: str, text: str) -> tuple[str, str] | None:
    """Return a name of the release before and today's, as "dtype int8" and "quantization int8"; else None."""
    if field == "dtype" and text in QUANTIZATIONS:
        return f"dtype {text}", f"quantization {text}"
    return (field, RENAMED[field]) if field in RENAMED else None


def _mebibytes(text: str) -> int:
    """Return vLLM's amount of memory in MiB: bytes, or 1k (1000), 1K (1024) up to T."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("must be a number of bytes, as in 4294967296, or with a suffix, as in 4G")
    number, suffix = found.groups()
    base = 1000 if suffix.islower() else 1024
    mebibytes = int(float(number) * base ** _POWERS[suffix.lower()]) >> 20
    if mebibytes < 1:
        raise ValueError("is less than 1 MiB: the amount is in bytes unless a suffix says otherwise")
    return mebibytes
