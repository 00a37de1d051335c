"""Hypothesis without deadlines: on a machine shared with other work a first example can take any time."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
