"""Text to token ids and back, from the model file itself: for the gateway, and for the workers' grammars."""
