"""One model on one device: shape, weights, decoder, paged blocks, prefix cache, sampling, runner.

The engine knows token ids, block numbers and tensors. It knows nothing of requests, wires, clocks or other
processes.
"""
