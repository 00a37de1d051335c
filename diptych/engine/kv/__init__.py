"""Paged KV memory: the blocks, who holds them, and the prefix cache over them."""
