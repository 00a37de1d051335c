"""`diptych bench`: a load generator for Diptych and for any server with an OpenAI-compatible API.

It runs in its own process and is a client like any other: of Diptych it knows the public protocol only.
"""
