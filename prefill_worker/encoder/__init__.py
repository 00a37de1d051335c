"""The encode worker: images in, rows of embeddings out, for any prefill worker that asks."""
