"""LeRobot's own policy classes with random weights, evaluated: ``make test-lerobot``, in an environment of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is written here: nothing may be fetched

import pytest
import torch

if torch.__version__.startswith("2.13"):  # of 0.4.4's environment; 0.6.1 has torch and torchvision that fit
    # torchvision's operators are built for another torch; LeRobot imports torchvision but calls none of these
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.configs.types import FeatureType, PolicyFeature, RTCAttentionSchedule
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.rtc.action_queue import ActionQueue
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

import headrace
from flat import evaluate
from headrace.cli import main
from headrace.envs.task import Rows
from headrace.envs.tasks.pusher import PusherCamera, PusherCameraCfg
from headrace.errors import ConfigError, DataError
from headrace.evaluation import EpisodeResult
from headrace.policies import (
    Batching,
    LeRobotPolicy,
    ObservationMap,
    PolicyServer,
    RemoteEngine,
    ServeCfg,
    as_chunk_policy,
    load_lerobot_policy,
)
from headrace.policies.protocol import ChunkContext, has_memory

STRICT = Batching(mode="strict", size=4)
STATE, ACTION = 17, 7
INPUTS = {
    "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
    "observation.images.image": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
}
OUTPUTS = {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))}
WORDS = ["<pad>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
WORDS += ["push", "the", "cube", "to", "left", "right", "middle"]


class ToldPusher(PusherCamera):
    """With an instruction per episode, of three."""

    def instructions(self, rows: Rows) -> list[str]:
        return [f"push the cube to the {('left', 'right', 'middle')[e % 3]}" for e in rows.episode_ids.tolist()]


headrace.register_task(
    headrace.TaskEntry(name="pusher-told", task=ToldPusher, cfg=PusherCameraCfg, summary="for this check")
)


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    """Of a dataset that never was: processors must change numbers, or a missing one would not be seen."""
    random = torch.Generator().manual_seed(1)

    def of(*shape: int) -> dict[str, torch.Tensor]:
        low = torch.randn(*shape, generator=random)
        return {
            "mean": torch.randn(*shape, generator=random),
            "std": torch.rand(*shape, generator=random) + 0.5,
            "min": low,
            "max": low + torch.rand(*shape, generator=random) + 0.5,
        }

    return {"observation.state": of(STATE), "observation.images.image": of(3, 1, 1), "action": of(ACTION)}


def act() -> ACTPolicy:
    torch.manual_seed(0)
    return ACTPolicy(
        ACTConfig(
            input_features=INPUTS,
            output_features=OUTPUTS,
            chunk_size=8,
            n_action_steps=8,
            dim_model=32,
            n_heads=2,
            dim_feedforward=32,
            n_encoder_layers=1,
            pretrained_backbone_weights=None,
            device="cpu",
        )
    )


def diffusion(scheduler: str = "DDPM", obs_steps: int = 2) -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(
        DiffusionConfig(
            input_features=INPUTS,
            output_features=OUTPUTS,
            n_obs_steps=obs_steps,
            horizon=16,
            n_action_steps=8,
            crop_shape=None,
            pretrained_backbone_weights=None,
            down_dims=(32, 64),
            n_groups=8,
            noise_scheduler_type=scheduler,
            num_inference_steps=3,
            spatial_softmax_num_keypoints=8,
            device="cpu",
        )
    )


def write_tiny_smolvlm(directory: Path) -> None:
    """A SmolVLM of two layers and a tokenizer of a dozen words, as the hub would hold them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    text = {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    SmolVLMConfig(
        text_config={**text, "pad_token_id": 0},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        image_token_id=2,
        scale_factor=2,
        pad_token_id=0,
    ).save_pretrained(directory)
    SmolVLMProcessor(SmolVLMImageProcessor(), fast, SmolVLMVideoProcessor()).save_pretrained(directory)


def smolvla(tmp_path: Path, *, rtc: bool = False) -> SmolVLAPolicy:
    vlm = tmp_path / "smolvlm"
    if not vlm.exists():
        write_tiny_smolvlm(vlm)
    torch.manual_seed(0)
    guided = RTCConfig(enabled=True, prefix_attention_schedule=RTCAttentionSchedule.LINEAR, execution_horizon=6)
    return SmolVLAPolicy(
        SmolVLAConfig(
            input_features=INPUTS,
            output_features=OUTPUTS,
            chunk_size=8,
            n_action_steps=8,
            vlm_model_name=str(vlm),
            num_vlm_layers=2,
            max_state_dim=STATE,
            max_action_dim=ACTION + 1,
            resize_imgs_with_padding=(32, 32),
            num_steps=3,
            tokenizer_max_length=12,
            rtc_config=guided if rtc else None,
            device="cpu",
        )
    )


def saved(policy: Any, directory: Path) -> Path:
    """A checkpoint as LeRobot's training writes it, with processors."""
    target = directory / "pretrained_model"
    policy.save_pretrained(target)
    for processor in make_pre_post_processors(policy.config, dataset_stats=statistics()):
        processor.save_pretrained(target)
    return directory


def play(policy: Any, num_envs: int, task: str = "pusher-camera", **how: Any) -> list[EpisodeResult]:
    env = headrace.make(
        task, num_envs, threads=1, autoreset="disabled", final_obs=False, overrides={"episode_length": 24}
    )
    given = {"episodes": 5, "execute": 8, "seed": 3, "progress": False, **how}
    if "engine" not in given or isinstance(given["engine"], str):
        given["batching"] = STRICT
    found = evaluate(env, policy, **given)
    env.close()
    assert len({episode.reward for episode in found.episodes}) == 5, "episodes must differ"
    return found.episodes


def context_of(rows: int, policy: Any, texts: tuple[str, ...] | None = None) -> ChunkContext:
    ids = torch.arange(rows)
    return ChunkContext(
        seeds=torch.full((rows,), 3),
        env_ids=ids,
        episode_ids=ids + 10,
        chunk_index=torch.zeros(rows, dtype=torch.int64),
        instructions=texts or ("push the cube to the left",) * rows,
        left_over=torch.zeros((rows, policy.horizon, policy.action_dim)),
        left_over_length=torch.zeros(rows, dtype=torch.int64),
        delay=torch.zeros(rows, dtype=torch.int64),
    )


def observation(rows: int, steps: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    shape = (rows,) if steps == 1 else (rows, steps)
    return {
        "policy": torch.randn(*shape, STATE, generator=random),
        "image": torch.randint(0, 256, (*shape, 64, 64, 3), generator=random, dtype=torch.uint8),
    }


def to_features(obs: dict[str, torch.Tensor], step: int | None = None) -> dict[str, Any]:
    """What LeRobot's own loop would give its preprocessor for one time step."""
    state, image = (obs[name] if step is None else obs[name][:, step] for name in ("policy", "image"))
    return {"observation.state": state, "observation.images.image": image.movedim(-1, -3).float() / 255}


@pytest.mark.parametrize("make", [act, diffusion], ids=["act", "diffusion"])
def test_tables_do_not_depend_on_num_envs_engine_or_server(make: Any, tmp_path: Path) -> None:
    directory = saved(make(), tmp_path)
    inline = play(load_lerobot_policy(directory), 5)
    torch.manual_seed(99)  # what is drawn elsewhere must not matter
    assert play(load_lerobot_policy(directory), 2, engine="thread") == inline
    with (
        PolicyServer(load_lerobot_policy(directory), ServeCfg(port=0, batching=STRICT)) as server,
        RemoteEngine(server.address) as engine,
    ):
        assert play(engine.policy, 3, engine=engine) == inline


def test_smolvla_hears_the_instruction_and_its_tables_do_not_depend_on_num_envs(tmp_path: Path) -> None:
    directory = saved(smolvla(tmp_path), tmp_path)
    inline = play(load_lerobot_policy(directory), 5, task="pusher-told")
    assert play(load_lerobot_policy(directory), 2, task="pusher-told", engine="thread") == inline
    assert play(load_lerobot_policy(directory), 5) != inline, "without instructions it plays something else"


def test_act_plans_what_lerobots_own_calls_give_with_its_processors(tmp_path: Path) -> None:
    directory = saved(act(), tmp_path)
    ours = as_chunk_policy(load_lerobot_policy(directory))
    assert (ours.horizon, ours.action_dim, ours.obs_steps) == (8, ACTION, 1)
    own = ACTPolicy.from_pretrained(directory / "pretrained_model")
    before, after = make_pre_post_processors(own.config, pretrained_path=str(directory / "pretrained_model"))
    obs = observation(3)
    chunk = own.predict_action_chunk(before(to_features(obs)))
    expected = torch.stack([after(chunk[:, row]) for row in range(8)], dim=1)
    torch.testing.assert_close(ours(obs, context_of(3, ours)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("obs_steps", [1, 2])
def test_diffusion_plans_the_actions_that_lerobots_own_loop_selects(obs_steps: int, tmp_path: Path) -> None:
    directory = saved(diffusion("DDIM", obs_steps), tmp_path)  # draws nothing after its first noise
    ours = as_chunk_policy(load_lerobot_policy(directory))
    assert (ours.horizon, ours.action_dim, ours.obs_steps) == (8, ACTION, obs_steps)
    own = DiffusionPolicy.from_pretrained(directory / "pretrained_model")
    before, after = make_pre_post_processors(own.config, pretrained_path=str(directory / "pretrained_model"))
    obs, context = observation(2, obs_steps), context_of(2, ours)
    noise = context.noise(16, ACTION)
    own.reset()
    steps = range(obs_steps) if obs_steps > 1 else (None,)
    for step in steps:
        batch = before(to_features(obs, step))
        first = own.select_action(batch, noise=noise)
        if step != (obs_steps - 1 if obs_steps > 1 else None):
            own._queues["action"].clear()  # planned too early: the history was not complete
    selected = [first] + [own.select_action(batch, noise=noise) for _ in range(7)]
    expected = torch.stack([after(action) for action in selected], dim=1)
    torch.testing.assert_close(ours(obs, context), expected, rtol=0, atol=0)


def test_the_noise_of_every_denoising_step_belongs_to_the_row() -> None:
    policy = as_chunk_policy(diffusion("DDPM"))
    obs, context = observation(4, 2), context_of(4, policy)
    whole = policy(obs, context)
    torch.manual_seed(7)
    assert torch.equal(policy(obs, context), whole)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = policy({name: values[order] for name, values in obs.items()}, context.rows(order))
    # rows of a matrix product change in their last bits with their place
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-4, atol=1e-4)
    assert "conditional_sample" not in vars(policy.policy.policy.diffusion), "the policy is left as it was"


def test_smolvla_plans_what_lerobots_own_calls_give_for_the_same_noise(tmp_path: Path) -> None:
    directory = saved(smolvla(tmp_path), tmp_path)
    ours = as_chunk_policy(load_lerobot_policy(directory))
    own = SmolVLAPolicy.from_pretrained(directory / "pretrained_model")
    before, after = make_pre_post_processors(own.config, pretrained_path=str(directory / "pretrained_model"))
    for step in before.steps:
        if hasattr(step, "padding"):
            step.padding = "max_length"
    texts = ("push the cube to the left", "push right")
    obs, context = observation(2), context_of(2, ours, texts)
    batch = before({**to_features(obs), "task": list(texts)})
    chunk = own.predict_action_chunk(batch, noise=context.noise(8, ACTION + 1))
    expected = after(chunk.flatten(0, 1)).reshape(2, 8, ACTION)
    torch.testing.assert_close(ours(obs, context), expected, rtol=0, atol=0)
    other = ours(obs, context_of(2, ours, ("push the cube to the left", "push left")))
    assert torch.equal(other[0], expected[0])
    assert not torch.equal(other[1], expected[1])


def test_real_time_chunking_gets_the_delay_and_its_own_raw_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(smolvla(tmp_path, rtc=True), tmp_path)
    policy = load_lerobot_policy(directory)
    assert has_memory(policy)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    predict = policy._predict

    def noted(batch: Any, **extra: Any) -> torch.Tensor:
        chunk = predict(batch, **extra)
        calls.append((extra, chunk))
        return chunk

    monkeypatch.setattr(policy, "_predict", noted)
    play(policy, 1, episodes=range(5), execute=4, latency=2)
    (first, chunk), *later = calls
    second = next(
        extra for extra, _ in later if "inference_delay" in extra
    )  # between them, rows are answered again to verify them
    assert "prev_chunk_left_over" not in first
    assert second["inference_delay"] == 2
    assert torch.equal(second["prev_chunk_left_over"][0], chunk[0, -second["prev_chunk_left_over"].shape[1] :])
    assert policy._chunks == {}, "nothing is kept of episodes that ended"


def test_real_time_chunking_plays_number_by_number_what_lerobots_own_queue_and_calls_give(tmp_path: Path) -> None:
    directory = saved(smolvla(tmp_path, rtc=True), tmp_path)
    ours = as_chunk_policy(load_lerobot_policy(directory))
    own = SmolVLAPolicy.from_pretrained(directory / "pretrained_model")
    before, after = make_pre_post_processors(own.config, pretrained_path=str(directory / "pretrained_model"))
    for step in before.steps:
        if hasattr(step, "padding"):
            step.padding = "max_length"
    queue, text = ActionQueue(own.config.rtc_config), "push the cube to the left"
    guided = 0
    for chunk, (executed, delay) in enumerate([(0, 0), (3, 2), (2, 1), (4, 3)]):
        for _ in range(executed):
            assert queue.get() is not None
        left = queue.get_left_over()
        lengths = torch.tensor([0 if left is None else len(left)])
        context = replace(
            context_of(1, ours, (text,)),
            chunk_index=torch.tensor([chunk]),
            left_over_length=lengths,
            delay=torch.tensor([delay]),
        )
        obs = {name: values[chunk : chunk + 1] for name, values in observation(4).items()}
        batch, noise = before({**to_features(obs), "task": [text]}), context.noise(8, ACTION + 1)
        raw = own.predict_action_chunk(batch, noise=noise, inference_delay=delay, prev_chunk_left_over=left)
        expected = after(raw.flatten(0, 1)).reshape(1, 8, ACTION)
        torch.testing.assert_close(ours(obs, context), expected, rtol=0, atol=0)
        guided += not torch.equal(raw, own.predict_action_chunk(batch, noise=noise))
        queue.merge(raw[0], expected[0], delay, None)
    assert guided == 3, "the left-over of every chunk but the first must have guided the next"


def test_real_time_chunking_gives_equal_tables_though_rows_differ_in_delay(tmp_path: Path) -> None:
    directory = saved(smolvla(tmp_path, rtc=True), tmp_path)
    how = {"execute": 4, "latency": 2}
    inline = play(load_lerobot_policy(directory), 5, **how)
    assert play(load_lerobot_policy(directory), 2, **how) == inline
    assert play(load_lerobot_policy(saved(smolvla(tmp_path), tmp_path / "plain")), 5, **how) != inline


def test_pi0_takes_the_noise_and_left_over_that_we_hand_it() -> None:
    """By its signature: its three billion weights are not made here, so it has not been run."""
    import inspect

    from lerobot.policies.pi0.modeling_pi0 import PI0Pytorch

    assert PI0Policy.name == "pi0"
    keywords = inspect.signature(PI0Policy.predict_action_chunk).parameters["kwargs"]
    assert keywords.kind is inspect.Parameter.VAR_KEYWORD
    assert "noise" in inspect.signature(PI0Pytorch.sample_actions).parameters


PLAYED = {"act", "diffusion", "smolvla", "pi0", "pi05"}


def test_every_type_of_lerobot_is_played_or_refused_with_a_reason() -> None:
    import lerobot.policies.factory  # noqa: F401  # registers the types
    from lerobot.configs.policies import PreTrainedConfig

    for kind in PreTrainedConfig.get_known_choices():

        class Policy:
            config = SimpleNamespace(type=kind, chunk_size=2)

            def predict_action_chunk(self, batch: Any, noise: Any = None) -> torch.Tensor:
                return torch.zeros(1)

        if kind in PLAYED:
            LeRobotPolicy(Policy())
        else:
            with pytest.raises(ConfigError, match=rf"type '{kind}': expected one that .*, got one that \w+"):
                LeRobotPolicy(Policy())


def test_a_policy_in_another_interpreter_plays_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(act(), tmp_path)
    lines = Path(__file__).read_text().split("_library = ")[1].splitlines()[:3]  # as above, for torchvision
    (tmp_path / "sitecustomize.py").write_text("\n".join(["import torch", f"_library = {lines[0]}", *lines[1:]]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    there = play(f"python:{sys.executable}:lerobot:{directory}", 2)
    assert there == play(load_lerobot_policy(directory), 3)


def test_renamed_cameras_are_played_through_a_map(tmp_path: Path) -> None:
    plain = play(load_lerobot_policy(saved(act(), tmp_path / "plain")), 3)
    renamed = act()
    renamed.config.input_features = {
        "observation.state": INPUTS["observation.state"],
        "observation.images.top_view": INPUTS["observation.images.image"],
    }
    directory = tmp_path / "renamed"
    target = directory / "pretrained_model"
    renamed.save_pretrained(target)
    known = statistics()
    known["observation.images.top_view"] = known.pop("observation.images.image")
    for processor in make_pre_post_processors(renamed.config, dataset_stats=known):
        processor.save_pretrained(target)
    mapping = ObservationMap(keys={"observation.images.top_view": "image", "observation.state": "policy"})
    assert play(f"lerobot:{directory}", 2, mapping=mapping) == plain
    with pytest.raises(ConfigError, match="expected a group 'top_view'"):
        play(f"lerobot:{directory}", 2)


def test_the_command_line_evaluates_a_checkpoint_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = saved(act(), tmp_path)
    words = ["evaluate", "pusher-camera", "--policy", f"lerobot:{directory}", "--episodes", "2", "--num-envs", "2"]
    assert main([*words, "--set", "episode_length=16"]) == 0
    assert "2 of 2 episodes" in capsys.readouterr().out


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a directory with config.json"):
        load_lerobot_policy(tmp_path)
    with pytest.raises(ConfigError, match="'hf download lerobot/act_aloha --local-dir DIR'"):
        load_lerobot_policy("lerobot/act_aloha")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="does not say the policy's type"):
        load_lerobot_policy(tmp_path)
