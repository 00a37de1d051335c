"""The prefill worker: compute-bound chunked prefill, written straight into granted blocks."""
