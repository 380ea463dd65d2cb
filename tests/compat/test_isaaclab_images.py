"""The image terms under Isaac Lab's names: each behavior that its own tests of them check."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from headrace.compat.isaaclab import (
    CameraFrameStack,
    image,
    image_depth,
    image_rgb,
    image_segmentation,
    is_depth_like,
    is_normals_like,
    is_rgb_like,
    normalize_camera_image,
    normalize_depth,
    normalize_normals,
    normalize_rgb,
    normalize_segmentation,
    stacked_image,
)
from headrace.errors import ShapeError, UnknownNameError

N, C = 3, 3
SHAPE = (N, 6, 5, C)


def env_with(**outputs: torch.Tensor) -> SimpleNamespace:
    """What the terms read of an Isaac Lab environment."""
    matrices = torch.tensor([[4.0, 0.0, 2.0], [0.0, 5.0, 3.0], [0.0, 0.0, 1.0]]).expand(N, 3, 3)
    camera = SimpleNamespace(data=SimpleNamespace(output=outputs, intrinsic_matrices=matrices))
    return SimpleNamespace(num_envs=N, device="cpu", scene=SimpleNamespace(sensors={"tiled_camera": camera}))


def show(env: SimpleNamespace, picture: torch.Tensor) -> SimpleNamespace:
    env.scene.sensors["tiled_camera"].data.output["rgb"] = picture
    return env


def flat(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(SHAPE, value, dtype=dtype)


def pixels(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape or SHAPE, dtype=torch.uint8, generator=generator)


def term(frame_stack: int) -> stacked_image:
    return stacked_image(SimpleNamespace(params={"frame_stack": frame_stack}), env_with())


def colors(x: torch.Tensor, spatial: tuple[int, int] = (1, 2)) -> torch.Tensor:
    scaled = x.float() / 255.0
    return scaled - scaled.mean(dim=spatial, keepdim=True)


def test_kinds_of_data_are_told_by_their_names() -> None:
    for name in ("rgb", "rgba", "albedo", "simple_shading_constant_diffuse", "simple_shading_diffuse_mdl"):
        assert is_rgb_like(name)
        assert not is_depth_like(name)
        assert not is_normals_like(name)
    for name in ("depth", "depth_linear", "distance_to_camera", "distance_to_plane"):
        assert is_depth_like(name)
        assert not is_rgb_like(name)
        assert not is_normals_like(name)
    for name in ("normals", "normals_object_frame"):
        assert is_normals_like(name)
        assert not is_rgb_like(name)
        assert not is_depth_like(name)
    assert not is_rgb_like("semantic_segmentation")


@pytest.mark.parametrize("data_type", ["rgb", "albedo", "simple_shading_diffuse_mdl", "semantic_segmentation"])
@pytest.mark.parametrize("dim", [-1, 3, 1, -3])
def test_colors_of_any_layout_dtype_and_strides_lose_their_mean(data_type, dim) -> None:
    spatial = (1, 2) if dim in (-1, 3) else (2, 3)
    for picture in (pixels(0), pixels(1, N, 6, 5, 8)[..., ::2], pixels(2).float()):
        if data_type == "semantic_segmentation" and picture.dtype != torch.uint8:
            continue
        before = picture.clone()
        result = normalize_camera_image(picture, data_type, channel_dim=dim)
        assert result.dtype == torch.float32
        # float32 sums there, exact ones here
        torch.testing.assert_close(result, colors(picture, spatial), atol=1e-6, rtol=0)
        assert torch.equal(picture, before)


def test_colors_with_more_axes_lose_the_mean_over_all_but_the_channels() -> None:
    film = pixels(3, N, 2, 6, 5, C)
    expected = film.float() / 255.0
    expected -= expected.mean(dim=(1, 2, 3), keepdim=True)
    torch.testing.assert_close(normalize_camera_image(film, "rgb"), expected, atol=1e-6, rtol=0)


def test_out_is_written_and_returned_also_in_another_layout() -> None:
    picture = pixels(4)
    out = torch.empty(SHAPE)
    assert normalize_camera_image(picture, "rgb", out=out) is out
    assert torch.equal(out, normalize_camera_image(picture, "rgb"))
    first = normalize_camera_image(picture, "rgb", output_channel_dim=1)
    assert first.is_contiguous()
    assert torch.equal(first, out.movedim(-1, 1))
    other = torch.empty(N, C, 6, 5)
    assert normalize_camera_image(picture, "rgb", out=other, output_channel_dim=-3) is other
    assert torch.equal(other, first)


def test_labels_distances_normals_and_the_rest() -> None:
    labels = torch.randint(0, 4, (N, 6, 5, 1), dtype=torch.int32)
    assert torch.equal(normalize_camera_image(labels, "semantic_segmentation"), labels.float())
    for kind in ("depth", "distance_to_camera", "distance_to_plane"):
        far = torch.tensor([[1.0, float("inf"), 3.0], [float("nan"), -float("inf"), 4.0]])
        result = normalize_camera_image(far, kind)
        assert result.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 4.0]]
        assert torch.isinf(far[0, 1]), "the camera keeps its picture"
    normals = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    assert normalize_camera_image(normals, "normals").tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    for kind in ("instance_segmentation", "motion_vectors"):
        other = torch.ones(2, 4, 4, 3)
        assert normalize_camera_image(other, kind) is other


def test_clone_decides_whether_the_cameras_own_memory_is_returned() -> None:
    picture = pixels(5)
    env = env_with(rgb=picture)
    camera = SimpleNamespace(name="tiled_camera")
    assert image(env, camera, "rgb", normalize=False, clone=False).data_ptr() == picture.data_ptr()
    assert image(env, camera, "rgb", normalize=False, clone=True).data_ptr() != picture.data_ptr()
    assert image(env, normalize=False).data_ptr() != picture.data_ptr(), "by default it is a copy"
    assert torch.equal(image(env), normalize_camera_image(picture, "rgb")), "by default it is normalized"
    with pytest.raises(UnknownNameError, match="tiled_camera"):
        image(env, "tilt_camera")
    with pytest.raises(UnknownNameError, match="rgb"):
        image(env, data_type="rbg")


@pytest.mark.parametrize("channel", [True, False])
def test_distances_to_the_camera_become_distances_along_its_axis(channel) -> None:
    v, u = torch.meshgrid(torch.arange(6.0), torch.arange(5.0), indexing="ij")
    rays = torch.stack([(u - 2) / 4, (v - 3) / 5, torch.ones_like(u)], dim=-1)
    depth = torch.rand(N, 6, 5) + 1
    distance = depth * rays.norm(dim=-1)
    env = env_with(distance_to_camera=distance[..., None] if channel else distance)
    result = image(env, data_type="distance_to_camera", convert_perspective_to_orthogonal=True)
    torch.testing.assert_close(result, depth[..., None] if channel else depth)


def test_a_stack_begins_with_its_first_frame_and_shifts_oldest_first() -> None:
    stack, env = term(3), env_with()
    first = stack(show(env, flat(10)), normalize=False)
    assert first.shape == (*SHAPE[:3], 3 * C)
    assert torch.equal(first, flat(10).repeat(1, 1, 1, 3))
    for value in range(11):
        result = stack(show(env, flat(value)), normalize=False)
    assert torch.equal(result, torch.cat([flat(8), flat(9), flat(10)], dim=-1))


def test_a_reset_begins_new_stacks_of_those_environments_only() -> None:
    stack, env = term(2), env_with()
    for value in (1, 2):
        stack(show(env, flat(value)), normalize=False)
    stack.reset(torch.tensor([0]))
    result = stack(show(env, flat(9)), normalize=False)
    assert result[:, 0, 0].tolist() == [[9.0] * 6, [2.0] * 3 + [9.0] * 3, [2.0] * 3 + [9.0] * 3]
    stack.reset()
    assert stack(show(env, flat(50)), normalize=False).unique().tolist() == [50.0]


def test_a_stack_of_colors_is_kept_as_uint8_and_normalized_frame_by_frame() -> None:
    stack, env = term(2), env_with()
    before = stack(show(env, pixels(1)))
    kept = before.clone()
    after = stack(show(env, pixels(2)), frame_stack=2)
    assert stack._frames._buffer.buffer.dtype == torch.uint8
    alone = [normalize_camera_image(pixels(seed), "rgb") for seed in (1, 2)]
    assert torch.equal(after, torch.cat(alone, dim=-1))
    assert torch.equal(before, kept), "what a trainer holds does not change"
    raw = stack(show(env, pixels(3)), normalize=False)
    assert raw.data_ptr() != stack(show(env, pixels(4)), normalize=False).data_ptr()


def test_a_stack_of_one_is_the_image_and_of_none_is_refused() -> None:
    env = env_with(rgb=pixels(7))
    assert torch.equal(term(1)(env), image(env))
    assert torch.equal(stacked_image(SimpleNamespace(params={}), env)(env), image(env))
    with pytest.raises(ValueError, match="frame_stack must be >= 1"):
        term(0)
    with pytest.raises(ValueError, match="made with frame_stack=2"):
        term(2)(env, frame_stack=3)


def test_a_stack_of_depth_has_no_infinity() -> None:
    env, stack = env_with(depth=torch.full((N, 6, 5, 1), float("inf"))), term(2)
    assert not stack(env, data_type="depth").any()


def test_each_kind_of_data_has_its_normalizing_function() -> None:
    x = pixels(1)
    assert torch.allclose(normalize_rgb(x), colors(x), atol=1e-6)
    assert torch.allclose(normalize_rgb(x, mean=0.5), x / 255 - 0.5)
    first = normalize_rgb(x, output_channel_dim=1)
    assert torch.equal(first, normalize_rgb(x).movedim(-1, 1))
    assert first.is_contiguous()
    out = torch.empty(SHAPE)
    assert normalize_rgb(x, out=out) is out
    metric = torch.tensor([1.0, float("inf"), float("nan"), 8.0]).view(1, 2, 2, 1)
    assert normalize_depth(metric).flatten().tolist() == [1, 0, 0, 8]
    assert normalize_depth(metric, invalid_value=4.0, max_depth=4.0).flatten().tolist() == [0.25, 1, 1, 1]
    assert torch.allclose(normalize_depth(metric, tanh_scale=2.0)[0, 0, 0], torch.tensor(0.5).tanh() - 0.5)
    assert metric[0, 0, 1].isinf(), "the camera's memory stays"
    with pytest.raises(ValueError, match="at most one"):
        normalize_depth(metric, max_depth=1.0, tanh_scale=1.0)
    assert normalize_normals(torch.tensor([[[[-1.0, 0.0, 1.0]]]])).flatten().tolist() == [0, 0.5, 1]
    labels = torch.full((1, 2, 2, 1), 7, dtype=torch.int32)
    assert normalize_segmentation(labels).dtype == torch.float32
    assert torch.equal(normalize_segmentation(x, output_channel_dim=1), first)
    raw = normalize_camera_image(labels, "instance_segmentation_fast", output_channel_dim=1)
    assert raw.shape == (1, 1, 2, 2)
    assert raw.dtype == torch.int32


@pytest.mark.parametrize("dims", [{"channel_dim": 4}, {"channel_dim": -5}, {"output_channel_dim": 4}])
@pytest.mark.parametrize("data_type", ["rgb", "depth", "normals", "semantic_segmentation", "motion_vectors"])
def test_channels_that_images_do_not_have_are_refused(data_type: str, dims: dict[str, int]) -> None:
    picture = pixels(1) if data_type == "rgb" else pixels(1).float()
    with pytest.raises(ShapeError, match="expected an axis of images with 4 axes"):
        normalize_camera_image(picture, data_type, **dims)


@pytest.mark.parametrize("channel_first", [False, True])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_camera_stacks_normalize_what_is_read(frame_stack: int, channel_first: bool) -> None:
    axis = 1 if channel_first else -1
    for normalize in (None, normalize_rgb, partial(normalize_rgb, mean=0.25)):
        for dtype in (torch.uint8, torch.float32):
            stack = CameraFrameStack(N, "cpu", frame_stack, channel_first)
            frames = [pixels(seed).to(dtype) for seed in range(4)]
            held = []
            for frame in frames:
                held.append(stack(frame, normalize))
            one = [frame if normalize is None else normalize(frame) for frame in frames]
            for step, seen in enumerate(held):
                newest = [one[max(0, step - k)] for k in reversed(range(frame_stack))]
                assert torch.equal(seen, torch.cat(newest, -1).movedim(-1, axis)), "and is not written later"
            stack.reset([1])
            again = stack(frames[0], normalize).movedim(axis, -1)
            assert torch.equal(again[1], torch.cat([one[0]] * frame_stack, -1)[1])
    with pytest.raises(ValueError, match="frame_stack must be >= 1"):
        CameraFrameStack(N, "cpu", 0)


@pytest.mark.parametrize(
    ("kind", "data_type", "data", "normalize", "arguments"),
    [
        (image_rgb, "rgb", pixels(3), normalize_rgb, {"mean": 0.5}),
        (image_depth, "distance_to_image_plane", pixels(4, N, 6, 5, 1).float(), normalize_depth, {"max_depth": 90.0}),
        (image_segmentation, "semantic_segmentation", pixels(5, N, 6, 5, 1).int(), normalize_segmentation, {}),
    ],
)
def test_image_terms_of_each_kind(kind, data_type, data, normalize, arguments) -> None:
    wrapped = SimpleNamespace(torch=data)  # newer versions hand out arrays with a tensor in them
    cfg = SimpleNamespace(params={"frame_stack": 2, "channel_first": True})
    term = kind(cfg, env_with())
    for env in (env_with(**{data_type: data}), env_with(**{data_type: wrapped})):
        seen = term(env, "tiled_camera", frame_stack=2, channel_first=True, **arguments)
        assert torch.equal(seen, normalize(torch.cat([data, data], -1).movedim(-1, 1), channel_dim=1, **arguments))
    if kind is image_segmentation:
        other = term(env_with(instance_segmentation_fast=data + 1), data_type="instance_segmentation_fast")
        assert other[:, 1].max() == data.max() + 1
    with pytest.raises(ValueError, match="frame_stack=2"):
        term(env, "tiled_camera", frame_stack=3)
