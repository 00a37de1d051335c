"""Text to token ids and back, from the model file itself: for the gateway, and for grammars in the workers."""
