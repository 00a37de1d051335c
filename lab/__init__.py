"""The laboratory: measurements beside peers and physical limits, run from a clone and not packaged."""
