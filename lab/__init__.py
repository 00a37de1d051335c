"""The laboratory: measurements beside peers and physical limits. Run from a clone; not part of the package."""
