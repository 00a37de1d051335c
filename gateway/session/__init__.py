"""The state of a request: its state machines and their driver, retries, and output for the client."""
