"""The directory in Redis: which workers live, and which of them holds which cached prefix.

Everything in it is a hint with a lease. Workers write it (publisher), gateways keep a copy in their
memory (mirror) and decide from the copy alone, so that no request ever waits for Redis or fails with
it. The pure part, what events mean, is in prefix_index; store names the keys and the connection.
"""
