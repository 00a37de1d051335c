"""Drivers of the KV handoff protocol: streams, clocks, processes and memory around the state machines."""
