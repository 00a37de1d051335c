"""The drivers of the KV handoff protocol: links, clocks, processes and memory around the state machines."""
