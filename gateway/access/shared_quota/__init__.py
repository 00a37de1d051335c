"""Quotas of API keys that several gateways share: each holds a slice, and renews it at a pool in Redis."""
