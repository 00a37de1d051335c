"""Who calls: API keys, what each may do, and how much of it."""
