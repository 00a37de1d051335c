"""The workers of this gateway: their links, their load, and the router that chooses among them."""
