"""Stores of KV blocks behind the block pool: memory of the host, a folder of files."""
