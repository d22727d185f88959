"""Speed and memory, side by side with peers in one process; never part of the tests."""
