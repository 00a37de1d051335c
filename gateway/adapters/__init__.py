"""The LoRA adapters of a gateway: names, digests, and who uses them."""
