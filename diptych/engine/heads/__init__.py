"""Heads that draft tokens from a model's hidden rows."""
