"""The KV handoff protocol: messages and state machines of both sides. Pure: no I/O, no clock."""
