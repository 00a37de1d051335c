"""What keeps a program from starting and its user can mend: a wrong path, a taken port, a missing device."""

CANNOT_START = "cannot start: "
"""The words before the message, by which a supervisor knows that another start would end in the same way."""


class StartupError(Exception):
    """The message is all that its user needs: no traceback goes with it."""
