"""Random numbers that are a pure function of a few integers, today and with the next version of numpy.

Only numpy's bit generators and seed sequences keep their streams for good (NEP 19); what a `Generator` makes of them
may change. So orders and draws are made from the raw 64-bit numbers here.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def raw(n: int, *key: int) -> NDArray[np.uint64]:
    """The first n 64-bit numbers of the Philox stream of a key (Salmon et al. 2011)."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(n)


def uniform(n: int, *key: int) -> NDArray[np.float64]:
    """The first n numbers of a key's stream in [0, 1), on a grid of 2**-53."""
    return (raw(n, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, *key: int) -> NDArray[Any]:
    """The numbers 0..n-1 in the order that a key draws, int64 [n]."""
    return np.argsort(raw(n, *key), kind="stable")
