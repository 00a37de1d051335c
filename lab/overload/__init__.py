"""Behaviour of a system at four times its capacity: waiting times and refusals.

python -m lab.overload
"""
