"""The engine: one model on one device, its shape, weights, backends, paged KV blocks, sampling and runner.

The engine knows token ids, block numbers and tensors. It knows nothing of requests, wires, clocks or other
processes.
"""
