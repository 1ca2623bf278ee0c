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
