"""The operators of kernels/ as Triton kernels for NVIDIA GPUs; what each means is in kernels/<operator>.py.

Only the Triton backend, lab/gpu and tests import this: Triton is not installed everywhere. With
TRITON_INTERPRET=1 in the environment before the first import, the kernels run on CPU tensors.

Tensors of a call are on one device, which is the current one. Nothing here waits for the device, and nothing
is allocated where `out` (and `scratch`) is given, so that every operator can be captured in a CUDA graph.
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError("Triton is not installed: pip install 'diptych[gpu]'") from error
