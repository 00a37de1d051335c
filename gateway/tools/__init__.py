"""Tools: shown to the model by its chat template; calls are read from its output."""
