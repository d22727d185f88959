"""Threads of a call: interruptions come before a thread's work, or after all of it."""

import _thread
import signal
import threading
import time

from shadowattn.online.workers import Workers


def interrupt_the_caller() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def late_and_interrupted(work, arguments):
    """`_thread.start_new_thread` of a thread that comes late, on a caller that is interrupted before it comes."""

    def late():
        time.sleep(0.1)
        work(*arguments)

    START(late, ())
    raise KeyboardInterrupt


START = _thread.start_new_thread


def test_waiting_is_for_everything():
    workers, done = Workers(), []
    for number in range(3):
        workers.start(lambda number=number: (time.sleep(0.1), done.append(number)))
    while len(workers._at_work) < 3:
        time.sleep(1e-3)
    assert workers.wait(lambda: None) == []
    assert sorted(done) == [0, 1, 2]


def test_interruptions_wait_for_the_work():
    workers, done, closes = Workers(), [], []

    def work():
        give_up = time.monotonic() + 30
        while not closes:  # an interruption before the wait would be the test's own
            time.sleep(1e-3)
        while (seen := len(closes)) < 3 and time.monotonic() < give_up:  # the wait closes anew for each that it received
            interrupt_the_caller()  # again where it came just before a lock was waited for, which does not wake for it
            again = time.monotonic() + 0.5
            while len(closes) == seen and time.monotonic() < again:
                time.sleep(1e-3)
        time.sleep(0.5)  # one that is on its way is still the wait's, and not the test's own
        done.append(True)

    workers.start(work)
    while not workers._at_work:
        time.sleep(1e-3)
    interruptions = workers.wait(lambda: closes.append(True))
    assert done
    assert len(interruptions) >= 2
    assert {type(error) for error in interruptions} == {KeyboardInterrupt}


def test_a_thread_that_comes_after_the_wait_does_nothing(monkeypatch):
    workers, done = Workers(), []
    monkeypatch.setattr(_thread, "start_new_thread", late_and_interrupted)
    try:
        workers.start(lambda: done.append(True))
    except KeyboardInterrupt:
        workers.wait(lambda: None)
    time.sleep(0.3)
    assert not done


def test_a_close_that_is_interrupted_is_called_again():
    workers, calls, waiting = Workers(), [], threading.Event()

    def close():
        calls.append(True)
        if len(calls) == 1:
            raise KeyboardInterrupt
        waiting.set()

    workers.start(lambda: waiting.wait(5))
    while not workers._at_work:
        time.sleep(1e-3)
    assert len(workers.wait(close)) == 1
    assert waiting.is_set()
