"""Choice of prefill attention: our own kernel, or FlashAttention-3 where the user asks for it.

`DIPTYCH_PREFILL_ATTENTION=flash` takes the library; anything else but `own` is refused by name. The
batch-invariant step has an operator of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from diptych.engine.backends.triton.operators import Operators, triton_operators
from diptych.engine.models.shape import UnsupportedModel

VARIABLE = "DIPTYCH_PREFILL_ATTENTION"


def chosen_operators(environment: Mapping[str, str] = os.environ) -> Operators:
    """Return the Triton kernels, with the prefill attention that `environment` names.

    Raises TritonUnavailable, or UnsupportedModel where the named one cannot be had.
    """
    operators, name = triton_operators(), environment.get(VARIABLE) or "own"
    if name == "own":
        return operators
    if name != "flash":
        raise UnsupportedModel(f"{VARIABLE} is {name!r}: it must be own or flash")
    # Imported here, as in triton_operators.
    from kernels.gpu.flash_prefill import flash_prefill, lacks_flash

    if (why := lacks_flash()) is not None:
        raise UnsupportedModel(f"{VARIABLE}=flash: {why}")
    return replace(operators, paged_prefill=flash_prefill)
