"""Output of a choice: from token ids to the text, tool calls and log-probabilities of its client."""
