"""One map for all policies: what they read is what the slow, plain formulas give, and it is part of the identity."""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import headrace
from headrace.errors import ConfigError, DataError, PolicyError, UnknownNameError
from headrace.evaluation import PlayCfg
from headrace.policies import LeRobotPolicy, ObservationMap
from headrace.policies.protocol import ChunkContext, one_row
from headrace.types import Obs


def _rotation_vector(quaternion: list[float]) -> list[float]:
    """openpi's examples/libero/main.py, in plain Python."""
    *vector, real = quaternion
    real = max(-1.0, min(1.0, real))
    length = math.sqrt(1.0 - real * real)
    return [0.0] * 3 if math.isclose(length, 0.0) else [part * 2.0 * math.acos(real) / length for part in vector]


def test_groups_are_cut_turned_and_put_side_by_side() -> None:
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    rows[:, 3:7] /= rows[:, 3:7].norm(dim=1, keepdim=True)
    rows[0, 3:7] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    keys = {
        "state": "policy[0:3] + axis_angle policy[3:7] + -policy[7:8]",
        "first": "axis_angle_wxyz policy[3:7]",
        "whole": "policy",
    }
    found = ObservationMap(keys=keys, dtypes={"state": "float64"}).fill({"policy": rows})
    for row, state, first in zip(rows.tolist(), found["state"], found["first"], strict=True):
        assert state == pytest.approx([*row[:3], *_rotation_vector(row[3:7]), -row[7]], abs=1e-6)  # float32
        assert first == pytest.approx(_rotation_vector([*row[4:7], row[3]]), abs=1e-6)
    assert found["state"].dtype == np.float64
    assert np.array_equal(found["whole"], rows.numpy())


def test_pictures_are_flipped_written_as_jpeg_resized_and_cropped_in_this_order() -> None:
    picture = torch.randint(256, (2, 20, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    mapping = ObservationMap(
        keys={"x": "camera"}, flips=("rows",), jpeg=95, image_size=(16, 16), resize="lanczos", crop=0.9
    )
    for given in (picture, picture.movedim(-1, 1).contiguous()):
        found = mapping.fill({"camera": given})["x"]
        for row, image in enumerate(picture.numpy()):
            file = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(image[::-1])).save(file, "jpeg", quality=95)
            small = Image.open(file).resize((16, 16), Image.Resampling.LANCZOS)
            edge = (1 - math.sqrt(0.9)) / 2 * 16
            box = (edge, edge, 16 - edge, 16 - edge)
            assert np.array_equal(found[row], np.asarray(small.resize((16, 16), Image.Resampling.BILINEAR, box=box)))


def test_a_map_is_written_and_read_and_refuses_what_it_cannot_do() -> None:
    mapping = ObservationMap(
        keys={"x": "camera", "s": "policy[0:3] + hand"}, image_size=(8, 9), crop=0.5, negated=(-1,)
    )
    assert ObservationMap.from_json(json.loads(json.dumps(mapping.to_json()))) == mapping
    assert ObservationMap().to_json() == {}
    for fields, message in (
        ({"keys": {"x": "policy[0"}}, "expected a group, or a part of one"),
        ({"keys": {"x": "policy + "}}, "expected a group, or a part of one"),
        ({"crop": 1.5}, "expected a share of the area"),
        ({"jpeg": 0}, "quality from 1 to 100"),
        ({"resize": "stretch"}, "expected 'pad' or 'lanczos'"),
        ({"dtypes": {"y": "float32"}}, "mapping dtypes: expected a key"),
    ):
        with pytest.raises(ConfigError, match=message):
            ObservationMap(**fields)  # type: ignore[arg-type]  # bad on purpose
    obs = {"policy": torch.zeros(1, 3), "whole": torch.zeros(1, 3, dtype=torch.int64)}
    for source in ("axis_angle policy", "-whole", "policy[2:9]", "elsewhere"):
        with pytest.raises(ConfigError, match="mapping 'x': expected"):
            ObservationMap(keys={"x": source}).fill(obs)
    with pytest.raises(DataError, match="mapping: key: it is unknown"):
        ObservationMap.from_json({"key": {}})


def _lean(obs: Obs, context: ChunkContext) -> Tensor:
    assert set(obs) == {"angle"}
    return -obs["angle"][:, None]


def test_a_local_policy_reads_the_keys_of_its_map_and_the_map_is_part_of_the_identity() -> None:
    mapping = ObservationMap(keys={"angle": "policy[1:2]"})

    def play(policy: object, mapping: ObservationMap | None) -> headrace.evaluation.Evaluation:
        cfg = PlayCfg(mapping=mapping, policy_id="lean", horizon=1)
        return headrace.evaluate("cartpole", policy, episodes=3, num_envs=2, play=cfg, progress=False)  # type: ignore[arg-type]

    mapped = play(_lean, mapping)
    plain = play(lambda obs, context: -obs["policy"][:, None, 1:2], None)
    turned = play(
        lambda obs, context: obs["angle"][:, None], ObservationMap(keys={"angle": "policy[1:2]"}, negated=(0,))
    )
    assert mapped.episodes == plain.episodes == turned.episodes
    assert mapped.identity is not None
    assert mapped.identity["mapping"] == {"keys": {"angle": "policy[1:2]"}}
    with pytest.raises(ConfigError, match="expected an evaluation of mapping"):
        headrace.evaluation.merge(mapped, plain)


class _Sees:
    """As a LeRobot policy: adds up the mean of its picture and of its state."""

    def __init__(self, picture: tuple[int, ...]) -> None:
        features = {"observation.images.top": picture, "observation.state": (2,)}
        self.config = SimpleNamespace(
            input_features={key: SimpleNamespace(shape=shape) for key, shape in features.items()},
            output_features={"action": SimpleNamespace(shape=(1,))},
            chunk_size=1,
            n_obs_steps=1,
        )

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        picture = batch["observation.images.top"]
        assert picture.dtype == torch.float32
        return (picture[:, 0].mean((1, 2)) + batch["observation.state"].mean(1))[:, None, None]


def test_groups_of_other_names_become_pictures_too_and_other_sizes_are_refused() -> None:
    obs = {"camera": torch.full((1, 6, 8, 3), 51, dtype=torch.uint8), "policy": torch.ones(1, 2)}
    groups = {"observation.images.top": "camera"}
    policy = LeRobotPolicy(_Sees((3, 6, 8)), groups=groups)
    assert float(policy(obs, one_row(""))) == pytest.approx(1.2)
    named = {"observation.images.top": obs["camera"], "policy": obs["policy"]}  # as a map gives it
    assert float(LeRobotPolicy(_Sees((3, 6, 8)))(named, one_row(""))) == pytest.approx(1.2)
    with pytest.raises(PolicyError, match=r"of shape \(3, 12, 8\), got \(3, 6, 8\) from the group 'camera'"):
        LeRobotPolicy(_Sees((3, 12, 8)), groups=groups)(obs, one_row(""))
    with pytest.raises(UnknownNameError, match=r"observation\.image\.top"):
        LeRobotPolicy(_Sees((3, 6, 8)), groups={"observation.image.top": "camera"})
    with pytest.raises(PolicyError, match="expected a group 'elsewhere' of the environment"):
        LeRobotPolicy(_Sees((3, 6, 8)), groups={"observation.images.top": "elsewhere"})(obs, one_row(""))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("jpeg", "9"), ("crop", "x"), ("crop", True), ("image_size", 3), ("keys", ["a"]), ("negated", ("a",))),
        *(("prompt", 3), ("flips", "rows"), ("dtypes", "float32"), ("actions", "actions")),
    ],
)
def test_settings_of_another_type_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"mapping {name}: expected"):
        ObservationMap(**{name: value})  # type: ignore[arg-type]  # bad on purpose


def test_a_sign_of_a_part_that_actions_lack_is_refused() -> None:
    mapping = ObservationMap(keys={"state": "policy"}, negated=(4,))
    with pytest.raises(ConfigError, match=r"mapping negated: expected parts of 1, got \(4,\)"):
        headrace.evaluate(
            "cartpole", lambda obs: torch.zeros(len(obs["state"]), 1), episodes=1, num_envs=1,
            play=PlayCfg(mapping=mapping), progress=False,
        )  # fmt: skip
