import signal

import pytest


@pytest.fixture(autouse=True)
def interruptible():
    """As at a terminal: where tests run in the background of a shell, SIGINT may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
