"""image_observation: one dispatch by the kind of camera data."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError, DtypeError, UnknownNameError
from headrace.history import image_observation, normalize_image

COLOR = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
DEPTH = torch.tensor([[[0.5, float("inf")], [float("nan"), 3.0]], [[-float("inf"), 2.0], [0.0, 10.0]]])[..., None]
IDS = torch.arange(40, dtype=torch.int32).reshape(2, 4, 5, 1)


@pytest.mark.parametrize("kind", ["rgb", "gray", "segmentation"])
def test_uint8_colors_are_normalized(kind) -> None:
    assert torch.equal(image_observation(kind, COLOR), normalize_image(COLOR))
    first = COLOR.permute(0, 3, 1, 2)
    assert torch.equal(image_observation(kind, first, channels="first"), normalize_image(first, channels="first"))


def test_distances_lose_what_is_not_finite_and_the_camera_keeps_its_picture() -> None:
    kind = "depth"
    before = DEPTH.clone()
    result = image_observation(kind, DEPTH)
    assert result.flatten().tolist() == [0.5, 0.0, 0.0, 3.0, 0.0, 2.0, 0.0, 10.0]
    assert image_observation(kind, DEPTH, missing=7.0)[0, 0, 1] == 7.0
    scaled = image_observation(kind, DEPTH, max_depth=4.0)
    assert scaled.flatten().tolist() == [0.125, 0.0, 0.0, 0.75, 0.0, 0.5, 0.0, 1.0]
    assert torch.equal(DEPTH.nan_to_num(), before.nan_to_num())
    assert result.data_ptr() != DEPTH.data_ptr()


def test_normals_move_to_zero_to_one() -> None:
    normals = torch.tensor([-1.0, 0.0, 1.0]).reshape(1, 1, 1, 3)
    assert image_observation("normals", normals).flatten().tolist() == [0.0, 0.5, 1.0]
    assert normals.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_ids_are_copied_unless_the_caller_copies_itself() -> None:
    kind, image = "segmentation", IDS
    result = image_observation(kind, image)
    assert torch.equal(result, image)
    assert result.dtype == image.dtype
    assert result.data_ptr() != image.data_ptr()
    assert image_observation(kind, image, clone=False) is image


def test_clone_false_still_never_writes_into_the_camera() -> None:
    before = COLOR.clone(), DEPTH.clone()
    image_observation("rgb", COLOR, clone=False).zero_()
    image_observation("depth", DEPTH, clone=False).zero_()
    assert torch.equal(COLOR, before[0])
    assert torch.equal(DEPTH.nan_to_num(), before[1].nan_to_num())


def test_float_rgb_is_normalized() -> None:
    torch.testing.assert_close(image_observation("rgb", COLOR.float()), normalize_image(COLOR), atol=6e-8, rtol=0)


def test_mistakes_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rgb"):
        image_observation("rbg", COLOR)  # type: ignore[arg-type]  # wrong on purpose
    for kind, image in (
        ("rgb", COLOR.int()),
        ("depth", COLOR),
        ("normals", COLOR),
        ("segmentation", DEPTH),
    ):
        with pytest.raises(DtypeError):
            image_observation(kind, image)
    for kind in ("depth", "segmentation", "rgb"):
        with pytest.raises(DtypeError, match="torch tensor"):
            image_observation(kind, DEPTH.numpy())
    with pytest.raises(ConfigError, match="only distances"):
        image_observation("rgb", COLOR, max_depth=1.0)
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="positive distance"):
            image_observation("depth", DEPTH, max_depth=value)
    with pytest.raises(ConfigError, match="finite"):
        image_observation("depth", DEPTH, missing=float("nan"))


@pytest.mark.parametrize("kind", ["rgb", "gray", "normals", "segmentation"])
def test_a_value_for_missing_distances_is_refused_of_what_is_no_distance(kind) -> None:
    with pytest.raises(ConfigError, match="missing: only distances have one"):
        image_observation(kind, torch.ones(2, 4, 4, 3), missing=5.0)


def test_unknown_channels_are_refused_of_every_kind() -> None:
    with pytest.raises(UnknownNameError, match="bogus"):
        image_observation("depth", torch.ones(2, 4, 4, 1), channels="bogus")


def test_float_pictures_between_0_and_1_are_refused() -> None:
    with pytest.raises(DtypeError, match="multiply pictures in 0 … 1 by 255"):
        image_observation("rgb", torch.rand(2, 4, 4, 3))
    assert image_observation("rgb", torch.zeros(2, 4, 4, 3)).abs().max() == 0
