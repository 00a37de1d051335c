"""Decoding and preparation of callers' images, in a process that may be lost over one."""
