"""As much of torch's tensors as the hook asks for, made of numpy's arrays."""

from __future__ import annotations

import numpy as np


class Tensor(np.ndarray):
    """As much of torch's as the hook asks for."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)

    def new_tensor(self, data):
        return np.array(data, dtype=self.dtype).view(Tensor)

    def index_select(self, dim, index):
        assert dim == 0
        return self[index]

    def bool(self):
        return self.astype(np.bool_)

    def clone(self):
        return self.copy()


def tensor(data):
    return np.array(data, dtype=np.int64).view(Tensor)
