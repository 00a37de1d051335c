"""One request on its way: the state machines that own it, and what they recover from."""
