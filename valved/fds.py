"""Owners of descriptors. What one step opened is closed unless the step that hands it on is reached, whatever fails in
between; and that nothing could be opened says nothing of what is there."""

from __future__ import annotations

import contextlib
import errno
import os

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Fds(contextlib.ExitStack):
    """Descriptors, and whatever else is to be undone, until another part owns all of them."""

    def own(self, fd: int) -> int:
        self.callback(os.close, fd)
        return fd

    def keep(self) -> None:
        """They are another's from here on. The last step, which cannot fail."""
        self.pop_all()


def is_scarce(error: OSError) -> bool:
    """It could not be opened for want of descriptors or memory: ask again, and take it for present until then."""
    return error.errno in _SCARCE
