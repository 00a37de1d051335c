"""Who runs, who waits, who is refused."""
