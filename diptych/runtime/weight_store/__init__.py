"""Packed weights of a CPU host: who has the file, who makes it, and how it passes from process to process.

protocol.py   messages over the abstract Unix socket
holder.py     the process that keeps the files: the supervisor, else the first worker
client.py     a worker that wants one
"""
