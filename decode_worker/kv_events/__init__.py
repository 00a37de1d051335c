"""Export of what the prefix cache holds, in the form of vLLM's KV events, for routers of others."""
