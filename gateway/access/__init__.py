"""API keys: authentication, scopes, and quotas of each key."""
