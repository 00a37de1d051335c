"""Tools: shown to the model by its chat template, called in what it writes, read back from there."""
