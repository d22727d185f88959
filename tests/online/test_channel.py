"""Channels between stages: bounded, in order, and closed for both sides at once."""

import threading
import time

import pytest

from shadowattn.online.channel import Channel, ClosedError


def start(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def asked_for(numbers: list[int], count: int):
    """0, 1, … and in `numbers` those that were asked for."""
    for number in range(count):
        numbers.append(number)
        yield number


@pytest.mark.parametrize("capacity", [1, 3])
def test_feeding_waits_at_capacity(capacity):
    channel, asked = Channel(capacity), []
    feeder = start(lambda: channel.feed(asked_for(asked, 9)))
    taken = iter(channel)
    for step in range(3):
        time.sleep(0.1)  # long enough for all that may be asked for, and for more
        assert len(asked) == capacity + 1 + step  # one more is in the feeder's hand
        assert next(taken) == step
    assert list(taken) == [3, 4, 5, 6, 7, 8]
    feeder.join(5)
    assert not feeder.is_alive()


def test_without_room_an_item_goes_from_hand_to_hand():
    channel, asked = Channel(0), []
    feeder = start(lambda: channel.feed(asked_for(asked, 4)))
    taken = iter(channel)
    for step in range(4):
        time.sleep(0.05)
        assert asked == list(range(step + 1))  # that which is in the feeder's hand
        assert next(taken) == step
    assert list(taken) == []
    feeder.join(5)
    assert not feeder.is_alive()


def test_closing_ends_both_waits():
    full, empty, closed = Channel(1), Channel(1), []

    def expect_closed(work):
        with pytest.raises(ClosedError):
            work()
        closed.append(work)

    sides = (lambda: full.feed(range(3)), lambda: list(empty))
    threads = [start(lambda side=side: expect_closed(side)) for side in sides]
    time.sleep(0.05)
    assert not closed
    full.close()
    empty.close()
    for thread in threads:
        thread.join(5)
    assert len(closed) == 2


def test_a_closed_channel_asks_for_nothing_and_gives_nothing():
    channel, asked = Channel(2), []
    channel.feed([7])
    channel.close()
    with pytest.raises(ClosedError):
        channel.feed(asked_for(asked, 1))
    assert not asked
    with pytest.raises(ClosedError):
        next(iter(channel))
