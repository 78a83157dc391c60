"""Requests whose KV has come, between the transfer thread, a worker's thread and a scheduler."""

from __future__ import annotations

import pickle
import threading

from disagg.vllm.received import NewlyReceived, ReceivedRequests


def test_requests_are_taken_once() -> None:
    requests = ReceivedRequests()
    requests.add("loaded", loaded=True)
    requests.add("failed", loaded=False)
    assert requests.newest().take() == {"loaded"}
    assert requests.newest().take() == set()
    assert requests.take() == {"loaded", "failed"}
    assert requests.take() == set()


def test_a_request_that_comes_ends_the_wait() -> None:
    requests = ReceivedRequests()
    thread = threading.Thread(target=requests.add, args=("d1", True))
    thread.start()
    assert requests.take(wait_s=100.0) == {"d1"}
    thread.join()
    assert requests.take(wait_s=1e-9) == set()


def test_the_newest_follow_later_requests() -> None:
    """vLLM reads the result of a step after it has launched the next one."""
    requests = ReceivedRequests()
    newest = requests.newest()
    requests.add("d1", loaded=True)
    assert newest.take() == {"d1"}


def test_another_process_and_several_workers_have_no_newest() -> None:
    requests = ReceivedRequests()
    requests.add("d1", loaded=True)
    copy = pickle.loads(pickle.dumps(requests.newest()))
    assert isinstance(copy, NewlyReceived)
    assert copy.take() == set()
    assert requests.newest().aggregate(copy).take() == set()
    assert requests.newest().take() == {"d1"}
