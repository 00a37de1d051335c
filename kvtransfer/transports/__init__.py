"""Transports: how bytes get into granted blocks, one file each.

A further transport implements both ends of `base` and is entered in `registry`.
"""
