"""From token ids to what a client reads."""
