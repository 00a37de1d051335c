"""What keeps a program from starting and its user can mend: a wrong path, a taken port, a missing device."""


class StartupError(Exception):
    """The message is all that its user needs: no traceback goes with it."""
