"""What the tests of training share."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring on ten columns, and much more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
