"""The decode worker: memory-bound continuous batching over paged KV blocks that prefill workers filled."""
