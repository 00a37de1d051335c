"""`python -m lab.peers.peak THREADS`: bf16 matrix products as fast as this machine makes them.

The best of several large shapes through torch (oneDNN): FLOP/s on standard output. What a prefill could
reach at most if it were nothing but such products.
"""

from __future__ import annotations

import sys
import time

import torch

_SHAPES = ((512, 1024, 1024), (512, 2048, 2048), (1024, 2048, 2048), (2048, 2048, 2048), (512, 1536, 4096))
_SECONDS_EACH = 0.4


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    print(max(_rate(*shape) for shape in _SHAPES))


def _rate(m: int, n: int, k: int) -> float:
    left = torch.randn(m, k, dtype=torch.bfloat16)
    right = torch.randn(n, k, dtype=torch.bfloat16)
    best = float("inf")
    deadline = time.perf_counter() + _SECONDS_EACH
    with torch.inference_mode():
        while time.perf_counter() < deadline:
            began = time.perf_counter()
            torch.nn.functional.linear(left, right)
            best = min(best, time.perf_counter() - began)
    return 2 * m * n * k / best


if __name__ == "__main__":
    main(int(sys.argv[1]))
