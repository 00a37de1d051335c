"""Error of a program that cannot start, and need not try again."""


class StartupError(Exception):
    """A wrong path, a taken port, a missing device: its user can mend it, and needs no traceback."""
