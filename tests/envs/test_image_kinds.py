"""Camera observations show the true scene of each environment, in every kind, at once or late from the history."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from headrace.envs import ImageSpec
from headrace.envs.batch_env import BatchEnv
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import ConfigError, UnknownNameError
from headrace.history import image_observation
from headrace.sim import CameraSpec, MujocoSim
from headrace.sim.mujoco_api import load_model
from headrace.types import Obs

XML = """
<mujoco><option timestep="0.01"/><statistic extent="2"/><worldbody>
  <light pos="0 0 3" dir="0 0 -1" directional="true"/>
  <geom type="plane" size="2 2 1" rgba="0.3 0.4 0.5 1"/>
  <body name="goal" mocap="true" pos="0.4 0.4 0.1">
    <geom name="goal" size="0.1" rgba="1 0 0 1" contype="0" conaffinity="0"/></body>
  <body name="block" pos="-0.4 0.3 0.1"><geom name="block" type="box" size="0.1 0.1 0.1" rgba="0 1 0 1"/></body>
  <body name="cart" pos="0 0 0.2"><joint name="slide" type="slide" axis="1 0 0" range="-1 1" limited="true"/>
    <geom name="cart" type="capsule" size="0.08 0.2" rgba="0 0 1 1" contype="0" conaffinity="0"/></body>
  <camera name="top" pos="0 -0.4 2.2" xyaxes="1 0 0 0 1 0.2"/>
</worldbody><actuator><motor joint="slide"/></actuator></mujoco>"""

CAMERA = CameraSpec(name="top", width=24, height=18)


@dataclass(frozen=True, kw_only=True)
class SceneCfg(TaskCfg):
    decimation: int = 2
    episode_length: int = 7


class SceneTask(Task):
    """Each episode has its own goal (mocap), block (place, size, color); the cart is pushed."""

    def __init__(self, pictures: dict[str, ImageSpec], randomize: bool = True, field: str | None = None) -> None:
        self._randomize, self._field = randomize, field
        super().__init__(SceneCfg(), load_model(XML), {"critic": 2}, pictures)

    def reset(self, rows: Rows) -> None:
        draws = rows.uniform("goal", 8)
        mocap = rows.get("mocap_pos").clone()
        mocap[:, 0, :2] = draws[:, :2] - 0.5
        rows.set("mocap_pos", mocap)
        if self._randomize:
            for name, columns, scale in (("body_pos", slice(2, 4), 0.6), ("geom_size", slice(4, 6), 0.2)):
                values = rows.get_model(name).clone()
                values[:, 2, :2] += scale * draws[:, columns]
                rows.set_model(name, values)
            color = rows.get_model("geom_rgba").clone()
            color[:, 2, :2] = draws[:, 6:8].to(color.dtype)
            rows.set_model("geom_rgba", color)
        if self._field is not None:
            rows.set_model(self._field, rows.get_model(self._field) * 1.1)

    def observe(self, rows: Rows) -> Obs:
        return {"critic": torch.cat([rows.get("qpos"), rows.get("qvel")], 1)}

    def reward(self, rows: Rows, actions: torch.Tensor) -> torch.Tensor:
        return rows.get("qpos")[:, 0]

    def terminated(self, rows: Rows) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.bool)


ALL_KINDS = {
    kind: ImageSpec(camera=CAMERA, kind=kind, frames=3) for kind in ("rgb", "gray", "depth", "segmentation", "normals")
}


def env_of(pictures: dict[str, ImageSpec], n: int = 4, **changes) -> BatchEnv:
    task = SceneTask(pictures, **changes)
    return BatchEnv(task, MujocoSim(task.model, n), seed=3)


def test_goals_that_are_mocap_bodies_are_drawn_where_they_are():
    env = env_of({"policy": ImageSpec(camera=CAMERA)}, 3, randomize=False)
    obs, _ = env.reset()
    assert len({image.numpy().tobytes() for image in obs["policy"]}) == 3
    assert len({image.tobytes() for image in env.render_each()}) == 3
    env.close()


def test_each_kind_has_its_channel_dtype_and_space():
    env = env_of(ALL_KINDS)
    obs, _ = env.reset()
    shapes = {"rgb": 9, "gray": 3, "depth": 3, "segmentation": 3, "normals": 9}
    for kind, channels in shapes.items():
        assert obs[kind].shape == (4, 18, 24, channels)
        assert env.single_observation_space[kind].contains(obs[kind][0].numpy()), kind
    assert set(obs["segmentation"].unique().tolist()) <= {-1, 0, 1, 2, 3}
    assert torch.equal(obs["depth"][..., 2], obs["depth"][..., 0]), "the first frame fills the stack"
    seen = obs["segmentation"][..., 2] >= 0
    lengths = obs["normals"][..., 6:9].norm(dim=-1)
    assert torch.allclose(lengths[seen], torch.ones(()), atol=1e-4)
    env.close()


def test_kinds_of_one_camera_are_drawn_in_one_pass():
    env = env_of(ALL_KINDS)
    env.reset()
    assert env.frames_drawn == 4
    together = env.observe()
    for kind, spec in ALL_KINDS.items():
        alone = env_of({kind: spec})
        obs, _ = alone.reset()
        assert torch.equal(obs[kind], together[kind]), kind
        alone.close()
    env.close()


def test_a_picture_drawn_late_is_the_picture_drawn_at_once():
    eager, lazy = env_of(ALL_KINDS), env_of(ALL_KINDS)
    eager.reset()
    lazy.reset()
    generator = torch.Generator().manual_seed(0)
    nobody = torch.zeros(4, dtype=torch.bool)
    for step in range(23):
        actions = torch.rand((4, 1), generator=generator) * 2 - 1
        if step == 5:
            eager.suspend([2])
            lazy.suspend([2])
        if step == 9:
            eager.resume([2])
            lazy.resume([2])
        drawn = eager.step(actions)
        looked = lazy.step(actions, observe=nobody if step % 5 else None)
        if step % 5 == 0:
            rows = eager.active  # a suspended environment shows what was drawn last
            for kind in ALL_KINDS:
                assert torch.equal(drawn.obs[kind][rows], looked.obs[kind][rows]), (step, kind)
        if step == 12:
            snapshot = lazy.state_dict()
            lazy.close()
            lazy = env_of(ALL_KINDS)
            lazy.reset()
            lazy.load_state_dict(snapshot)
    assert lazy.frames_drawn < eager.frames_drawn
    late = lazy.observe()
    for kind, image in eager.observe().items():
        assert torch.equal(late[kind], image), kind
    eager.close()
    lazy.close()


def test_the_picture_shows_the_episodes_own_place_size_and_color():
    env = env_of({"policy": ImageSpec(camera=CAMERA), "ids": ImageSpec(camera=CAMERA, kind="segmentation")})
    obs, _ = env.reset()
    assert len({(ids == 2).sum().item() for ids in obs["ids"]}) > 1, "blocks of different sizes"
    for image, ids, rgba in zip(obs["policy"], obs["ids"], env.sim.model_field("geom_rgba")[:, 2], strict=True):
        color = image[ids[..., 0] == 2].float().mean(0)
        assert color[2] == 0
        assert (color[0] > color[1]) == (rgba[0] > rgba[1])
    env.close()


def test_what_a_picture_cannot_show_is_refused():
    env = env_of({"policy": ImageSpec(camera=CAMERA)}, field="cam_sensorsize")
    with pytest.raises(ConfigError, match="cam_sensorsize"):
        env.reset()
    env.close()


def test_depth_says_what_stands_for_nothing_and_is_normalized_by_a_distance():
    up = replace(CAMERA, name="top")
    plain = ImageSpec(camera=up, kind="depth")
    specs = {
        "plain": plain,
        "missing": replace(plain, missing=0.0),
        "unit": replace(plain, normalize=True, max_depth=2.0),
    }
    task_xml = XML.replace('xyaxes="1 0 0 0 1 0.2"', 'xyaxes="1 0 0 0 0.3 1"')

    class Sideways(SceneTask):
        def __init__(self) -> None:
            self._randomize, self._field = False, None
            Task.__init__(self, SceneCfg(), load_model(task_xml), {"critic": 2}, specs)

    task = Sideways()
    env = BatchEnv(task, MujocoSim(task.model, 1), seed=0)
    obs, _ = env.reset()
    far = obs["plain"].max()
    nothing = obs["plain"] == far
    assert nothing.any()
    assert (obs["missing"][nothing] == 0).all()
    assert torch.equal(obs["missing"][~nothing], obs["plain"][~nothing])
    assert torch.equal(obs["unit"], (obs["plain"] / 2).clamp(max=1))
    env.close()


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_an_environments_image_is_the_observation_of_its_raw_image(layout):
    raw = {kind: replace(spec, layout=layout) for kind, spec in ALL_KINDS.items()}
    specs = {
        **raw,
        **{f"{kind}, read": replace(raw[kind], normalize=True) for kind in ("rgb", "gray", "normals")},
        "depth, read": replace(raw["depth"], normalize=True, max_depth=2.0),
        "segmentation, read": raw["segmentation"],
    }
    env = env_of(specs)
    env.reset()
    obs = env.step(torch.ones(4, 1)).obs
    for kind in ALL_KINDS:
        depth = {"max_depth": 2.0} if kind == "depth" else {}
        # the frames of a stack are so many more channels
        read = image_observation(kind, obs[kind], channels=layout.removeprefix("channels_"), **depth)
        assert torch.equal(obs[f"{kind}, read"], read), kind
    env.close()


def test_wrong_requests_are_refused_before_anything_starts():
    with pytest.raises(UnknownNameError, match="depth"):
        ImageSpec(camera=CAMERA, kind="dept")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="native"):
        ImageSpec(camera=CAMERA, renderer="nativ")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_depth"):
        ImageSpec(camera=CAMERA, kind="depth", normalize=True)
    with pytest.raises(ConfigError, match="no normals"):
        ImageSpec(camera=CAMERA, kind="normals", renderer="gl")
    with pytest.raises(UnknownNameError, match="top"):
        env_of({"policy": ImageSpec(camera=replace(CAMERA, name="topp"))})


@pytest.mark.system
def test_the_gl_renderer_gives_mujocos_own_picture():
    import mujoco

    env = env_of({"policy": ImageSpec(camera=CAMERA, renderer="gl")}, 1, randomize=False)
    obs, _ = env.reset()
    model = env.sim.model
    data = mujoco.MjData(model)
    data.qpos[:] = env.sim.field("qpos")[0].numpy()
    data.mocap_pos[:] = env.sim.field("mocap_pos")[0].numpy()
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 18, 24) as renderer:
        renderer.update_scene(data, "top")
        assert np.array_equal(obs["policy"][0].numpy(), renderer.render())
    env.close()


def test_a_term_table_observes_the_same_images_as_a_class_task() -> None:
    from headrace.envs.tasks.cartpole import TermTask, cartpole_camera_terms

    table = cartpole_camera_terms()
    camera = table.images["policy"].camera
    kinds = {kind: ImageSpec(camera=camera, kind=kind, frames=2) for kind in ALL_KINDS}
    task = TermTask(replace(table, images=kinds))
    env = BatchEnv(task, MujocoSim(task.model, 3), seed=3)
    plain = BatchEnv(TermTask(table), MujocoSim(task.model, 3), seed=3)
    obs, reference = env.reset()[0], plain.reset()[0]
    for _ in range(4):
        actions = torch.tensor([[0.5], [-1.0], [1.0]])
        obs, reference = env.step(actions).obs, plain.step(actions).obs
    assert torch.equal(obs["rgb"], reference["policy"])
    assert obs["depth"].dtype == torch.float32
    assert set(kinds) <= set(obs)
    shapes = {kind: obs[kind].shape for kind in kinds}
    assert shapes["depth"] == (3, 48, 48, 2)
    assert shapes["normals"] == (3, 48, 48, 6)
    assert len(obs["segmentation"].unique()) > 1


def test_data_types_that_are_not_the_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave data_types out"):
        ImageSpec(camera=CameraSpec(name="c", width=4, height=4, data_types=("depth",)))
    ImageSpec(camera=CameraSpec(name="c", width=4, height=4, data_types=("depth",)), kind="depth")
