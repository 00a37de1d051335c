"""Metrics that are read at each scrape: of models, adapters and workers, and vLLM's names for them."""
