"""normalize_image: layouts, stacks, ownership, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.errors import DeviceError, DtypeError, ShapeError, UnknownNameError
from headrace.history import normalize_image
from headrace.types import StackSpec
from pretend_cuda import pretend_cuda


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def reference(x: Tensor, spatial: tuple[int, int]) -> Tensor:
    scaled = x.double() / 255
    return scaled - scaled.mean(spatial, keepdim=True)


@pytest.mark.parametrize(
    ("shape", "channels", "spatial"),
    [
        ((4, 9, 7, 3), "last", (1, 2)),
        ((4, 3, 9, 7), "first", (2, 3)),
        ((4, 9, 7), "none", (1, 2)),
        ((9, 7, 3), "last", (0, 1)),
        ((9, 7), "none", (0, 1)),
        ((2, 5, 9, 7, 3), "last", (2, 3)),
        ((2, 5, 3, 9, 7), "first", (3, 4)),
        ((0, 9, 7, 3), "last", (1, 2)),
        ((3, 1, 1, 4), "last", (1, 2)),
    ],
)
def test_each_image_and_channel_loses_its_own_mean(shape, channels, spatial) -> None:
    x = pictures(*shape)
    result = normalize_image(x, channels=channels)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    # float64 against float32: one rounding of values below 1
    torch.testing.assert_close(result.double(), reference(x, spatial), atol=6e-8, rtol=0)


@pytest.mark.parametrize("channels", ["last", "first"])
def test_strided_views_give_the_bits_of_their_contiguous_copy(channels) -> None:
    x = pictures(6, 20, 18, 4)
    for view in (x[::2], x[:, 1::2], x[:, :, ::3], x.transpose(1, 2), x.flip(0)[1:], x.permute(0, 3, 1, 2), x[..., 1:]):
        expected = normalize_image(view.contiguous(), channels=channels)
        assert torch.equal(normalize_image(view, channels=channels), expected)
    lead = pictures(3, 4, 5, 6, 2).transpose(0, 1)
    assert torch.equal(normalize_image(lead), normalize_image(lead.contiguous()))
    out = torch.empty(4, 3, 5, 6, 2).transpose(0, 1)
    assert torch.equal(normalize_image(lead.transpose(0, 1), out=out), normalize_image(lead.transpose(0, 1)))


@pytest.mark.parametrize("frames", [1, 2, 4, 5])
@pytest.mark.parametrize(("dim", "channels"), [(-1, "last"), (0, "first")])
def test_normalizing_a_stack_is_bit_equal_to_stacking_normalized_frames(frames, dim, channels) -> None:
    spec = StackSpec(frames=frames, dim=dim)
    shape = (11, 13, 3) if channels == "last" else (3, 11, 13)
    x = pictures(5, frames, *shape)
    after = normalize_image(spec.stack(x), channels=channels)
    before = spec.stack(torch.stack([normalize_image(x[:, k], channels=channels) for k in range(frames)], 1))
    assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("channels", "spatial"), [("last", (1, 2)), ("first", (2, 3))])
def test_floating_point_pictures_are_normalized_as_uint8_ones_are(dtype, channels, spatial) -> None:
    x = pictures(3, 6, 5, 7)
    result = normalize_image(x.to(dtype), channels=channels)
    assert result.dtype == torch.float32
    # whole numbers up to 255 are exact in each dtype: only the last rounding may differ from the uint8 path
    torch.testing.assert_close(result.double(), reference(x, spatial), atol=6e-8, rtol=0)
    halves = x.to(dtype) / 2
    torch.testing.assert_close(normalize_image(halves, channels=channels), result / 2, atol=6e-8, rtol=0)


def test_consecutive_outputs_never_alias_one_that_is_held() -> None:
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        result = normalize_image(pictures(32, 64, 64, 3, seed=step))
        held.append((result, result.clone()))
        if step % 3 == 2:
            held.pop(0)
    view = held[0][0][3:5, ::2]
    kept = view.clone()
    pointer = held[0][0].data_ptr()
    del held[0], result
    for step in range(4):
        assert normalize_image(pictures(32, 64, 64, 3, seed=50 + step)).data_ptr() != pointer
    assert torch.equal(view, kept)
    for result, copy in held:
        assert torch.equal(result, copy)


def test_memory_that_nobody_holds_is_used_again() -> None:
    x = pictures(32, 64, 64, 3)
    pointers = {normalize_image(x).data_ptr() for _ in range(6)}
    assert len(pointers) == 1


def test_out_is_written_and_returned() -> None:
    x = pictures(2, 8, 8, 3)
    out = torch.empty(2, 8, 8, 3)
    assert normalize_image(x, out=out) is out
    assert torch.equal(out, normalize_image(x))


def test_the_input_is_never_written() -> None:
    x = pictures(4, 8, 8, 3)
    before = x.clone()
    normalize_image(x)
    assert torch.equal(x, before)


def test_wrong_inputs_say_what_is_expected() -> None:
    x = pictures(2, 8, 8, 3)
    bad = [
        (DtypeError, "expected uint8", lambda: normalize_image(x.int())),
        (DtypeError, "torch tensor", lambda: normalize_image(x.numpy())),
        (ShapeError, r"\(…, H, W, C\)", lambda: normalize_image(x[0, 0])),
        (ShapeError, r"\(…, C, H, W\)", lambda: normalize_image(x[0, 0], channels="first")),
        (ShapeError, "at least one pixel", lambda: normalize_image(x[:, :0])),
        (ShapeError, "at least one pixel", lambda: normalize_image(x[..., :0])),
        (DtypeError, "out", lambda: normalize_image(x, out=torch.empty(x.shape, dtype=torch.float64))),
        (ShapeError, "out", lambda: normalize_image(x, out=torch.empty(2, 8, 8, 4))),
        (DeviceError, "out", lambda: normalize_image(x, out=torch.empty(x.shape, device="meta"))),
    ]
    for error, match, call in bad:
        with pytest.raises(error, match=match):
            call()


def test_an_unknown_place_of_the_channels_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown channels 'frist'; did you mean 'first'"):
        normalize_image(torch.zeros(2, 3, 3, 1, dtype=torch.uint8), channels="frist")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("strided", [False, True], ids=["out", "rows of a larger out"])
def test_a_gpu_writes_into_the_tensor_that_it_is_given(strided: bool) -> None:
    x = pictures(4, 9, 7, 3)
    expected = normalize_image(x)
    with pretend_cuda() as device:
        there = x.to("cuda")
        memory = torch.full((8, 9, 7, 3), -1.0).to("cuda")
        out = memory[::2] if strided else memory[:4]
        device.clear()
        given = normalize_image(there, out=out)
        assert given.data_ptr() == out.data_ptr()
        assert device.waits == 0
        assert device.off_stream.total() == 0
        assert torch.equal(out.cpu(), expected)
        rest = memory[1::2] if strided else memory[4:]
        assert (rest.cpu() == -1.0).all()
