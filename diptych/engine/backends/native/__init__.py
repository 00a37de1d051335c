"""The CPU backend: one native call per step."""
