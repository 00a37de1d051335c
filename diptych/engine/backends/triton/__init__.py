"""The Triton backend: steps as kernels, and what a device has to give.

`TritonBackend` (backend.py) runs any batch, `DecodeGraphs` (decode_graphs.py) decode steps captured as CUDA
graphs. Everything also runs on the CPU, by Triton's interpreter or with the reference operators.
"""
