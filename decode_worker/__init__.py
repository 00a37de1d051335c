"""The decode worker: memory-bound continuous batching over paged KV blocks that were handed over."""
