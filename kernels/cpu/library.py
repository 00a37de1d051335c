"""The shared library of the native step through ctypes; abi.h has the meaning of each call.

ctypes releases the GIL for the length of every call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

ABI_VERSION = 34
_PATH = Path(os.environ.get("DIPTYCH_NATIVE_LIBRARY") or Path(__file__).with_name("_step.so"))
"""Another build of the library is for tests of that build (make sanitize)."""


class LibraryMissing(RuntimeError):
    """The shared library was not built, or is not the one that this package was written for."""


class Experts(Structure):
    """`DiptychExperts`; all zero: none."""

    _fields_ = (
        ("count", c_int32),
        ("picked", c_int32),
        ("intermediate", c_int32),
        ("shared_intermediate", c_int32),
        ("routing", c_int32),
        ("normalise", c_int32),
        ("scale", c_float),
        ("groups", c_int32),
        ("picked_groups", c_int32),
        ("best_two", c_int32),
    )


class Shape(Structure):
    """`DiptychShape`."""

    _fields_ = (
        ("dtype", c_int32),
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("rms_epsilon", c_float),
        ("query_scale", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_cap", c_float),
        ("score_cap", c_float),
        ("growth", c_float),
        ("growth_length", c_int32),
        ("activation", c_int32),
        ("clamp", c_float),
        ("gated", c_int32),
        ("norm_after_rotation", c_int32),
        ("sinks", c_int32),
        ("attention_gate", c_int32),
        ("experts", Experts),
    )


class PartExperts(Structure):
    """`DiptychPartExperts`."""

    _fields_ = (
        ("first", c_int32),
        ("end", c_int32),
        ("intermediate", c_int32),
        ("shared_intermediate", c_int32),
    )


class Share(Structure):
    """`DiptychShare`; pointers are addresses of arrays that live until the call returns."""

    _fields_ = (
        ("ranks", c_int32),
        ("rank", c_int32),
        ("own_parts", c_int32),
        ("head_ends", c_void_p),
        ("inner_ends", c_void_p),
        ("group_ends", c_void_p),
        ("experts", POINTER(PartExperts)),
        ("query_lanes", c_int32),
        ("key_lanes", c_int32),
        ("counted", c_void_p),
        ("block_kv_heads", c_int32),
        ("vocab", c_int32),
        ("first_token", c_int32),
        ("first_stage", c_int32),
        ("last_stage", c_int32),
        ("file", c_int32),
    )


class Recurrent(Structure):
    """`DiptychRecurrent`; all zero: none."""

    _fields_ = (
        ("kind", c_int32),
        ("place", c_int32),
        ("channels", c_int32),
        ("taps", c_int32),
        ("groups", c_int32),
        ("heads", c_int32),
        ("state", c_int32),
        ("width", c_int32),
        ("rank", c_int32),
        ("apart", c_int32),
        ("norm", c_int32),
        ("epsilon", c_float),
        ("largest_rate", c_float),
        ("least_step", c_float),
        ("largest_step", c_float),
    )


class Layer(Structure):
    """`DiptychLayer`."""

    _fields_ = (
        ("window", c_int32),
        ("rotation", c_int32),
        ("experts", c_int32),
        ("attention", c_int32),
        ("feed_forward", c_int32),
        ("norms_before", c_int32),
        ("norms_after", c_int32),
        ("recurrent", Recurrent),
    )


class Rotation(Structure):
    """`DiptychRotation`: addresses of two tables `[positions, head_dim / 2]`."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p))


class Matrix(Structure):
    """`DiptychMatrix`."""

    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int32),
        ("columns", c_int32),
        ("format", c_int32),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("slopes", c_void_p),
    )


class Batch(Structure):
    """`DiptychBatch`; all pointers are addresses of arrays that live until the call returns."""

    _fields_ = (
        ("sequences", c_int32),
        ("block_size", c_int32),
        ("tokens", c_void_p),
        ("counts", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("table_lengths", c_void_p),
        ("memories", c_void_p),
        ("memory_blocks", c_void_p),
        ("logit_rows", c_void_p),
        ("abort_words", c_void_p),
        ("greedy", c_void_p),
        ("adapters", c_void_p),
        ("block_stride", c_int64),
        ("kept", c_int32),
        ("turns", c_void_p),
        ("ends", c_void_p),
        ("parents", c_void_p),
        ("hidden", c_void_p),
        ("taps", c_int32),
        ("tapped", c_void_p),
        ("features", c_void_p),
        ("layer_places", c_void_p),
        ("windowed", c_int32),
        ("window_tables", c_void_p),
        ("window_firsts", c_void_p),
        ("window_lengths", c_void_p),
        ("enters", c_void_p),
        ("leaves", c_void_p),
        ("image_layers", c_int32),
        ("image_rows", c_int32),
        ("image_stride", c_int64),
        ("image_places", c_void_p),
        ("images", c_void_p),
        ("embeddings", c_void_p),
        ("page_block_bytes", c_int64),
        ("stale", c_void_p),
        ("settled", c_void_p),
    )


class ChangePart(Structure):
    """`DiptychChangePart`."""

    _fields_ = (("b", c_void_p), ("begin", c_int32), ("ranks", c_int32), ("strips", c_int32))


class Change(Structure):
    """`DiptychChange`."""

    _fields_ = (
        ("layer", c_int32),
        ("which", c_int32),
        ("a", c_void_p),
        ("scales", c_void_p),
        ("depth", c_int32),
        ("ranks", c_int32),
        ("parts", c_int32),
        ("interleaved", c_int32),
        ("own_part", c_int32),
        ("part", ChangePart * 4),
    )


FP32, BF16, BLOCKS, BYTES = 0, 1, 2, 3
DENSE, Q4_0, Q4_1, Q8_0, I8, I8_CODED = 0, 1, 2, 3, 4, 5
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = 6, 7, 8, 9, 10, 11
IQ4_NL, MXFP4 = 12, 13
KV_OWN, KV_INT8 = 0, 1
OK, ALL_ABORTED, INVALID, FAILED = 0, 1, 2, 3
QKV, OUTPUT, GATE_UP, DOWN, HEAD, ROUTER, SHARED_GATE_UP, SHARED_DOWN = 0, 1, 2, 3, 4, 5, 6, 7
RECURRENT_IN, RECURRENT_SIDE, RECURRENT_INNER, RECURRENT_STEPS, RECURRENT_OUT = 8, 9, 10, 11, 12
CORE_FREE, CORE_OWNED, CORE_CLAIMED = 0, 1, 2
INPUT_NORM, POST_NORM, QUERY_NORM, KEY_NORM, FINAL_NORM = 0, 1, 2, 3, 4
ATTENTION_OUTPUT_NORM, FEED_FORWARD_OUTPUT_NORM, SINKS, ROUTER_CORRECTION = 5, 6, 7, 8
FILTER, FILTER_BIAS, DECAY, STEP_BIAS, SKIP = 9, 10, 11, 12, 13
RECURRENT_NORM, STEP_NORM, B_NORM, C_NORM = 14, 15, 16, 17
SHORT_CONV, GATED_DELTA, MAMBA2, MAMBA = 1, 2, 3, 4
SILU, GELU, GELU_TANH, RELU_SQUARED, CLAMPED_SWIGLU = 0, 1, 2, 3, 4
SOFTMAX_THEN_TOPK, TOPK_THEN_SOFTMAX, SIGMOID = 0, 1, 2

_SIGNATURES = {
    "diptych_abi_version": (c_int32, ()),
    "diptych_last_error": (c_char_p, ()),
    "diptych_instruction_set": (c_char_p, (c_int32, c_int32)),
    "diptych_model_new": (c_void_p, (POINTER(Shape), c_char_p)),
    "diptych_share_new": (c_void_p, (POINTER(Shape), POINTER(Share), c_char_p)),
    "diptych_model_free": (None, (c_void_p,)),
    "diptych_set_layer": (c_int32, (c_void_p, c_int32, POINTER(Layer))),
    "diptych_set_expert": (c_int32, (c_void_p, c_int32, c_int32, c_int32, POINTER(Matrix), c_int32)),
    "diptych_set_part_linear": (c_int32, (c_void_p, c_int32, c_int32, c_int32, POINTER(Matrix), c_int32)),
    "diptych_set_part_expert": (
        c_int32,
        (c_void_p, c_int32, c_int32, c_int32, c_int32, POINTER(Matrix), c_int32),
    ),
    "diptych_set_linear": (c_int32, (c_void_p, c_int32, c_int32, POINTER(Matrix), c_int32)),
    "diptych_set_vector": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_int32)),
    "diptych_set_embedding": (c_int32, (c_void_p, c_void_p)),
    "diptych_embed_from_head": (c_int32, (c_void_p,)),
    "diptych_embedding_rows": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
    "diptych_share_weights": (c_int32, (c_void_p, c_int32, c_int64)),
    "diptych_close_weights": (c_int32, (c_void_p,)),
    "diptych_map_weights": (c_int32, (c_void_p, c_int32)),
    "diptych_set_rotations": (c_int32, (c_void_p, POINTER(Rotation), c_int32, c_int32)),
    "diptych_adapter_new": (c_void_p, (c_void_p, POINTER(Change), c_int32)),
    "diptych_adapter_free": (None, (c_void_p,)),
    "diptych_set_adapter": (c_int32, (c_void_p, c_int32, c_void_p)),
    "diptych_set_guests": (c_int32, (c_void_p, c_void_p, POINTER(c_int32), c_int32)),
    "diptych_step": (c_int32, (c_void_p, POINTER(Batch), c_int32, c_int32, c_void_p, c_void_p)),
    "diptych_launch": (c_uint64, (c_void_p, POINTER(Batch), c_void_p, c_int32, c_int32, c_void_p)),
    "diptych_tell": (None, (c_void_p, c_int32)),
    "diptych_is_over": (c_int32, (c_void_p, c_uint64)),
    "diptych_collect": (c_int32, (c_void_p, c_uint64)),
}


def library_path() -> Path:
    """Return the file of the library, which may not be there."""
    return _PATH


@cache
def load() -> ctypes.CDLL:
    """Load the library and declare its signatures. Raises LibraryMissing."""
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise LibraryMissing(
            f"the native CPU step cannot be loaded ({error}); was there no C++ compiler at installation?"
        ) from error
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise LibraryMissing(f"{_PATH.name} is of another version: {error}") from error
    if library.diptych_abi_version() != ABI_VERSION:
        raise LibraryMissing(
            f"{_PATH.name} speaks version {library.diptych_abi_version()}, not {ABI_VERSION}: build it again"
        )
    return library


def last_error(library: ctypes.CDLL) -> str:
    """Return the message of this thread's last call that failed."""
    message: bytes = library.diptych_last_error()
    return message.decode()


def instruction_sets(dtype: int) -> list[str]:
    """Return the names of the instruction sets that this machine runs, best first. Raises LibraryMissing."""
    library = load()
    names: list[str] = []
    while (name := library.diptych_instruction_set(len(names), dtype)) is not None:
        names.append(name.decode())
    return names
