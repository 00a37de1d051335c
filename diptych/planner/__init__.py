"""Capacity and cost planning: the fleet that a load needs, computed before anything is bought.

`model_costs.py` counts bytes and operations from a model's shape, `hardware.py` has what cards do,
`rates.py` gives times from both or from measurements, `capacity.py` sizes the fleet, `money.py` prices it.
Pure, but for readers of files.
"""
