"""Callers' images: limits, decoding in a child process, and the memory that their pixels take."""
