"""Recurrent layers of the Triton step: one file a kind, and where the states of a step's rows lie."""
