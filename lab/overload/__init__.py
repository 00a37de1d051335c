"""What a system does when four times as much comes as it can do: who waits how long, who is told to go.

python -m lab.overload
"""
