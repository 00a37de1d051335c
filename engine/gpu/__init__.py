"""The step on a GPU: packed weights, packed batches, the layers as kernels, and what a device has to give.

engine/triton_backend.py puts them together for any batch, engine/decode_graphs.py for decode steps that are
replayed. All of it runs on CPU tensors too: with Triton's interpreter, or with the meanings of the operators.
"""
