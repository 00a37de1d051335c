"""Reasoning: what a model writes before its answer, told apart by the tokens that mark it."""
