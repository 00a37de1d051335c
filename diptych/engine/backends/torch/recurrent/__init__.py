"""Layers that keep a recurrent state in place of keys and values: their maths in torch, a file for each kind."""
