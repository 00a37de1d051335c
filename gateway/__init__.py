"""Gateway: the public APIs, text processing, admission, and the routing of requests to workers.

Only this program handles text; workers handle token ids. It imports neither torch nor transformers.
"""
