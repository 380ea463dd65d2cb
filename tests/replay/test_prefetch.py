"""Batches that a thread draws ahead."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from test_mixture import filled

from headrace.errors import ConfigError, LifecycleError
from headrace.replay import Mixture
from headrace.replay._batches import Batches
from pretend_cuda import PretendTensor, _Dispatch, _Functions, pretend_cuda


def test_batches_are_those_of_sample_in_order() -> None:
    ahead, plain = filled(0.0), filled(0.0)
    with ahead.prefetch(16, ahead=3) as batches:
        for _ in range(10):
            here, there = next(batches), plain.sample(16)
            assert torch.equal(here["index"], there["index"])
            assert torch.equal(here["next", "observation"], there["next", "observation"])
    with pytest.raises(LifecycleError, match="closed"):
        next(batches)


def test_batches_are_ready_before_they_are_asked_for() -> None:
    buffer, drawn = filled(0.0), threading.Semaphore(0)
    plain = buffer.sample
    with mock.patch.object(buffer, "sample", lambda size: (plain(size), drawn.release())[0]):
        batches = buffer.prefetch(4, ahead=2)
        # two wait in the queue, and one is being handed over
        assert all(drawn.acquire(timeout=10) for _ in range(3))
        assert not drawn.acquire(timeout=0.3)
        next(batches)
        assert drawn.acquire(timeout=10)
        batches.close()
        batches.close()
    assert not any(thread.name == "headrace-prefetch" for thread in threading.enumerate())


def test_an_error_of_the_thread_is_raised_by_next() -> None:
    batches = Mixture([filled(0.0, steps=0)]).prefetch(4)
    with pytest.raises(LifecycleError, match=r"part 0 .* extend\(\) it first"):
        next(batches)
    with pytest.raises(LifecycleError, match="closed"):
        next(batches)
    with pytest.raises(ConfigError, match="ahead"):
        filled(0.0).prefetch(4, ahead=0)


class _Stream:
    """Counts what is recorded on it and what waits for it."""

    def __init__(self, device: object = None) -> None:
        self.events, self.waited = 0, 0

    def record_event(self) -> int:
        self.events += 1
        return self.events

    def wait_event(self, event: int) -> None:
        self.waited = event


class _Pretended(Batches):
    """The pretend device belongs to one thread; this lets another draw on it as well."""

    def __init__(self, source: Batches, pretend: object) -> None:
        self.source, self.pretend, self.device = source, pretend, source.device

    def sample(self, batch_size: int):
        with _Functions(self.pretend), _Dispatch(self.pretend):
            return self.source.sample(batch_size)

    def update_priorities(self, index, priority) -> None: ...


@pytest.mark.gpu
def test_the_host_waits_for_no_copy_to_the_device() -> None:
    host = filled(0.0, n_step=2)
    recorded: list[object] = []
    with pretend_cuda() as device:
        buffer = filled(0.0, n_step=2, device="cuda")
        device.clear()
        stream = device.stream = _Stream()
        with (
            mock.patch.object(torch.cuda, "Stream", _Stream),
            mock.patch.object(torch.cuda, "stream", nullcontext),
            mock.patch.object(PretendTensor, "record_stream", lambda _, stream: recorded.append(stream), create=True),
            _Pretended(buffer, device).prefetch(8) as batches,
        ):
            for number in range(1, 4):
                batch, expected = next(batches), host.sample(8)
                assert stream.waited == number
                for key in expected.keys(include_nested=True, leaves_only=True):
                    assert batch[key].device.type == "cuda", key
                    assert torch.equal(batch[key].host, expected[key]), key
        assert device.waits == 0, (device.syncs, device.to_host, device.blocking)
        assert len(recorded) == 3 * len(list(expected.keys(include_nested=True, leaves_only=True)))
