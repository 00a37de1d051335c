"""One request on its way: the state machines that own it, what they recover from, what workers are told."""
