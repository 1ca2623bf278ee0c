"""What can go wrong on the cluster side, by what the reader must do about it."""

# What reading a value fails with when somebody wrote another kind of value, none, or one that is too large.
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class SchedulerError(Exception):
    """Root of all errors of this package."""


class InvalidObject(SchedulerError):
    """A user or a node wrote something that cannot be used.

    Names the field, the value and what is allowed.
    """


class NotReady(SchedulerError):
    """The answer would rest on an incomplete view of the cluster; ask again soon."""


class NoPlace(SchedulerError):
    """The chosen node no longer takes the job; kube-scheduler should try again."""


def in_words(error: BaseException) -> str:
    """For a line of a log or of a status: what a person can do something with, not how Python writes it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, KeyError):
        return f"{' '.join(map(str, error.args))} is missing"
    return str(error) or _UNSAID.get(type(error).__name__, type(error).__name__)


_UNSAID = {"TimeoutError": "no answer in time"}
