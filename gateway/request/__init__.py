"""Validation: a caller's message → checked, plain values, or an error that names the bad field."""
