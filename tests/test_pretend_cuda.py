"""The pretend CUDA device behaves as the real one where our tests rely on it."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
import pytest
import torch

from headrace.errors import HeadraceError
from headrace.history import CircularBuffer
from pretend_cuda import PretendCuda, PretendTensor, pretend_cuda

HERE = "tests/test_pretend_cuda.py"


@pytest.fixture
def device() -> Generator[PretendCuda]:
    with pretend_cuda() as made:
        yield made


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="cuda"),
        lambda: torch.tensor([[0.0] * 3] * 2, device="cuda"),
        lambda: torch.as_tensor(np.zeros((2, 3), np.float32), device="cuda:0"),
        lambda: torch.zeros(2, 3).to("cuda"),
        lambda: torch.zeros(2, 3).to(torch.device("cuda"), torch.float32),
        lambda: torch.zeros(2, 3).cuda(),
        lambda: torch.zeros(2, 3, pin_memory=True).to("cuda", non_blocking=True),
        lambda: torch.rand(2, 3, device="cuda", generator=torch.Generator(device="cuda")) * 0,
    ],
)
def test_every_way_to_make_a_tensor_gives_one_on_the_device(device: PretendCuda, make: Callable[[], object]) -> None:
    tensor = make()
    assert isinstance(tensor, PretendTensor)
    assert (tensor.device, tensor.is_cuda, tensor.shape) == (torch.device("cuda:0"), True, (2, 3))
    assert torch.equal(tensor.cpu(), torch.zeros(2, 3))


def test_results_are_those_of_the_cpu_and_views_share_memory(device: PretendCuda) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    y = x.to("cuda")
    assert torch.equal((y @ y.T + y[:, :1]).cpu(), x @ x.T + x[:, :1])
    row = y[1]
    assert row.add_(100.0) is row
    y[torch.tensor([0], device="cuda"), 2:] = -1.0
    x[1] += 100.0
    x[0, 2:] = -1.0
    assert torch.equal(y.cpu(), x)
    assert y[1].data_ptr() == row.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.zeros(3),
        lambda x: torch.cat([x, torch.zeros(3)]),
        lambda x: torch.where(x > 0, x, torch.zeros(3)),
        lambda x: torch.zeros(3)[torch.zeros(3, dtype=torch.int64, device="cuda")],
        lambda x: x.index_put_((torch.tensor([0, 1], device="cuda"),), torch.zeros(2)),
        lambda x: torch.add(x, x, out=torch.zeros(3)),
    ],
)
def test_tensors_of_two_devices_are_refused(device: PretendCuda, mix: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices"):
        mix(torch.zeros(3, device="cuda"))


def test_numbers_and_indices_of_the_host_are_allowed(device: PretendCuda) -> None:
    x = torch.arange(3.0, device="cuda")
    device.clear()
    assert (x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0]
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    assert device.to_device.total() == 1  # the indices
    assert device.to_host.total() == 2


def test_numpy_is_refused_as_on_a_gpu(device: PretendCuda) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        torch.zeros(3, device="cuda").numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(torch.zeros(3, device="cuda"))


def test_waits_of_the_host_are_counted_with_their_place(device: PretendCuda) -> None:
    x = torch.arange(4.0, device="cuda")
    mask = x > 1
    device.clear()
    assert bool(mask.any())
    assert x[mask].shape == (2,)
    assert int(mask.sum()) == 2
    assert mask.nonzero().shape == (2, 1)
    assert x.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
    torch.cuda.synchronize()
    names = sorted(name for name, _ in device.syncs.elements())
    assert names == ["boolean index", "item", "item", "nonzero", "synchronize"]
    assert all(place.startswith(HERE) for _, place in device.syncs)
    assert (device.to_host.total(), device.waits) == (1, 6)


def test_work_that_stays_on_the_device_waits_for_nothing(device: PretendCuda) -> None:
    x = torch.zeros(64, 8, device="cuda")
    device.clear()
    for _ in range(10):
        x = torch.where(x > 0.5, x * 0.5, x + 0.25).clamp_(0.0, 1.0)
    assert (device.waits, device.to_device.total()) == (0, 0)
    assert device.operations.total() > 0


def test_copies_are_counted_by_direction(device: PretendCuda) -> None:
    host, there = torch.ones(3), torch.zeros(3, device="cuda")
    device.clear()
    there.copy_(host)
    there[:2] = host[:2]
    host.copy_(there)
    there.clone()
    assert (device.to_device.total(), device.to_host.total()) == (2, 1)


def test_modules_run_on_the_device(device: PretendCuda) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ELU(), torch.nn.Linear(8, 2))
    x = torch.randn(5, 4)
    expected = network(x).detach()
    with torch.no_grad():
        assert torch.equal(network.to("cuda")(x.to("cuda")).cpu(), expected)
    with pytest.raises(RuntimeError, match="two devices"):
        network(x)


def test_warp_kernels_take_and_give_tensors_of_the_device() -> None:
    import warp

    with pretend_cuda(warp=True):
        x = torch.arange(3.0, device="cuda")
        array = warp.from_torch(x)
        again = warp.to_torch(array)
        again.add_(1.0)
        assert again.device == x.device
        assert x.tolist() == [1.0, 2.0, 3.0]


def test_outside_the_block_there_is_no_cuda() -> None:
    with pretend_cuda():
        kept = torch.zeros(3, device="cuda")
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.zeros(3, device="cuda")
    assert torch.equal((kept + 1).cpu(), torch.ones(3))


def test_an_append_to_a_buffer_on_the_device_never_waits_for_it(device: PretendCuda) -> None:
    buffer = CircularBuffer(4, num_envs=8, device="cuda")
    rows = torch.arange(24.0).reshape(8, 3).to("cuda")
    buffer.append(rows)
    device.clear()
    buffer.append(rows + 100.0)
    assert device.waits == 0, device.syncs
    assert torch.equal(buffer.buffer[:, -1].cpu(), torch.arange(24.0).reshape(8, 3) + 100.0)
    with pytest.raises(HeadraceError):
        buffer.append(torch.zeros(8, 3))
