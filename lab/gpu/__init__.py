"""`python -m lab.gpu`: what an NVIDIA GPU gives, from its own ceilings up to the whole service.

Every section is a function that yields figures (section.py); each compares itself with a ceiling or a peer
that was measured in the same run.
"""
