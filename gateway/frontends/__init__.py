"""Frontends: one folder per public protocol, each of which turns it into calls of the same core."""
