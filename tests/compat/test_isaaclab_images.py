"""The image terms under Isaac Lab's names: each behavior that its own tests of them check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headrace.compat.isaaclab import (
    image,
    is_depth_like,
    is_normals_like,
    is_rgb_like,
    normalize_camera_image,
    stacked_image,
)
from headrace.errors import UnknownNameError

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
    assert stack._buffer.buffer.dtype == torch.uint8
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
    with pytest.raises(ValueError, match="made with 2"):
        term(2)(env, frame_stack=3)


def test_a_stack_of_depth_has_no_infinity() -> None:
    env, stack = env_with(depth=torch.full((N, 6, 5, 1), float("inf"))), term(2)
    assert not stack(env, data_type="depth").any()
