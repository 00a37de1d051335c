"""Where there is no NVIDIA GPU, Triton's kernels run in its interpreter.

Triton reads the variable when it is imported, which any test module may cause: so it is set before them all.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
