"""Links: long-lived streams of messages between two of our own processes.

What travels is `diptych.worker.v1`; how it travels is decided here. Over gRPC between any two machines, and
over a Unix socket where both ends share a network namespace and a user, for a seventh of the CPU time.
"""
