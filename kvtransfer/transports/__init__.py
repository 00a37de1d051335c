"""How bytes get into granted blocks. A further transport is one new file with the two ends of `base`."""
