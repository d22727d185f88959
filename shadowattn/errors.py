"""The one kind of error that a user's input can cause, and the one that says which stage of a pipeline failed."""


class InputError(ValueError):
    """Something the user gave does not fit.

    The message is one line: what was expected, what came, and what to do. The command line prints it and exits with
    status 2, without a traceback.
    """


class StageError(RuntimeError):
    """A stage of the pipeline failed for a reason that no input explains; the message names stage and heads."""
