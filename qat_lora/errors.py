"""The one exception that means "the input is at fault": its message is shown as a single line, without a traceback."""


class UserError(ValueError):
    """Bad input. The message names the value and the mend, on one line."""
