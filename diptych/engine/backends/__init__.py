"""Backends that compute a step: torch (the reference), native (C++ for CPUs) and triton (NVIDIA GPUs)."""
