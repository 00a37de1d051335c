"""Tensor parallelism: the parts of a model, and what its ranks need of one another.

A *part* is a slice of every layer: some heads, some of the feed-forward's inner numbers, some rows of the
vocabulary. The number of parts is chosen once for all workers (`--sum-parts`), and a *rank*, a process of a
group, computes several parts in a row. Each part is computed as if it were alone, whatever the degree, and
what the parts add to the residual is added in their order. So the degree changes no bit.
"""
