"""PyTorch's count of threads for the tests of CPU kernels, and what a fork beside threads warns of."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# fork() beside threads warns from Python 3.12 on; a loader warns of more workers than the test may use cores
FORKS = ("ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")


@contextmanager
def set_threads(n: int) -> Iterator[None]:
    """So many threads inside, and no other count when it ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
        assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
