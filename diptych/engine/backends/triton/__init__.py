"""The step on a GPU: packed weights, packed batches, the layers as kernels, and what a device has to give.

diptych/engine/backends/triton/backend.py puts them together for any batch, diptych/engine/backends/triton/decode_graphs.py for decode steps that are
replayed. All of it runs on CPU tensors too: with Triton's interpreter, or with the meanings of the operators.
"""
