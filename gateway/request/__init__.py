"""From a caller's message to checked, plain values: the bad field is named before anything runs."""
