"""``headrace.load_policy``: the one way from what a user names, a file, a run, a module, a server, to a policy.

A chunk policy that reads: the words of an instruction become the goal of the policy for ``pusher-solid``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from headrace._named import load_made
from headrace._published import find_published_file, read_published
from headrace.envs.recipe import EnvRecipe
from headrace.envs.registry import make_task
from headrace.envs.task import count_actions
from headrace.envs.tasks.pusher import INSTRUCTIONS, PusherWordsCfg, goal_offsets
from headrace.errors import ConfigError, DataError, UnknownNameError, require_extra
from headrace.files import hide_secrets, write_whole
from headrace.policies.act import SHIPPED, ActPolicy, instruction_numbers, read_policy
from headrace.policies.protocol import ChunkContext, ChunkPolicy, PolicyLike, as_chunk_policy
from headrace.policies.serving.links import RemoteCfg
from headrace.types import Obs

if TYPE_CHECKING:
    from headrace.envs.recipe import AnyEnv
    from headrace.libraries.training import CheckpointMeta, FileKind, Kept
    from headrace.policies.foreign import ForeignPolicy
    from headrace.policies.observation_map import ObservationMap


class PusherWordsPolicy(nn.Module):
    """Plays ``pusher-words``. Deterministic.

    Args:
        goal_range: that of the task.
    """

    obs_steps = 1
    policy_identity = "pusher-words-1"

    def __init__(self, goal_range: float = PusherWordsCfg.goal_range) -> None:
        super().__init__()
        self.act = cast("ActPolicy", load_policy("pusher-solid"))
        self.horizon, self.action_dim = self.act.horizon, self.act.action_dim
        model = make_task("pusher-words").model
        middle = torch.tensor(model.body_pos[model.body("goal").id], dtype=torch.float64)
        goals = middle.repeat(len(INSTRUCTIONS), 1)
        # the goal's joints are y first
        goals[:, :2] += goal_offsets(torch.arange(len(INSTRUCTIONS)), goal_range).flip(1)
        self.register_buffer("goals", goals.to(torch.float32))

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan float32 (n, horizon, action_dim) of ``policy`` (n, 20) and the instructions."""
        rows, goals = obs["policy"], self.get_buffer("goals")[instruction_numbers(context, INSTRUCTIONS)]
        return self.act({"policy": torch.cat((rows, goals.to(rows)), dim=1)})


PolicySource: TypeAlias = PolicyLike | RemoteCfg | str | Path | None
"""What :func:`load_policy` takes."""
Origin = Literal["explicit", "latest", "best", "published"]
_LEROBOT, _FOREIGN, _WORDS = "lerobot:", "python:", "pusher-words"
_SERVERS = ("ws", "wss", "tcp", "openpi", "gr00t")
"""Schemes of addresses of policy servers; others are those of files."""
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPolicy:
    """A policy that was found, checked as far as possible without an environment, and not loaded yet."""

    source: PolicyLike | RemoteCfg | ForeignPolicy | Path
    kind: FileKind | Literal["object", "remote", "foreign"]
    origin: Origin = "explicit"
    uri: str | None = None
    """Where the file was fetched from."""
    score: float | None = None
    library: str | None = None
    meta: CheckpointMeta | None = None
    overrides: dict[str, object] = field(default_factory=dict[str, object])
    """Settings of the task that the policy was trained with."""

    @property
    def path(self) -> Path:
        """The file of a policy that is one."""
        return cast("Path", self.source)


def load_policy(
    source: PolicySource,
    env: AnyEnv | EnvRecipe | None = None,
    *,
    horizon: int | None = None,
    mapping: ObservationMap | None = None,
    library: str | None = None,
    deterministic: bool = True,
    trust: bool = False,
    device: str = "cpu",
) -> ChunkPolicy:
    """Load a policy to play in an environment.

    Args:
        source: a checkpoint that ``headrace train`` or ``headrace imitate`` wrote, the directory of a training,
            ``latest`` or ``best`` of ``runs/``, ``published``, the name of a task that ships with a policy, a
            TorchScript or ONNX file, the URI of a file; ``module:name`` of a policy object, class or function;
            ``lerobot:DIR``, which the directory alone means as well; either of these in another interpreter,
            ``python:PATH/bin/python:module:name``; the address of a server, such as ``openpi://HOST:8000`` or
            ``gr00t://HOST:5555``, whose API key is in the variable ``HEADRACE_API_KEY``, or a
            :class:`headrace.policies.RemoteCfg`; an object that
            :func:`headrace.policies.as_chunk_policy` takes; None for the published one of the task. A function that
            states no horizon returns one action per observation row.
        env: what it is played in, or its recipe; needed for the checkpoint of a training, for ``latest``, ``best``,
            ``published`` and None, and for sizes that the policy does not state.
        horizon: rows of a chunk, where the policy does not state them.
        mapping: from observation groups to the keys that the policy reads.
        library: only checkpoints of this library; None for any.
        deterministic: the mean action of a training's policy; False to sample.
        trust: load a file that holds more than weights, which can execute arbitrary code; load only files you trust.
        device: where the weights of a chunk policy go.

    Returns:
        A policy of one kind whatever its source; that of a training has horizon 1. One of a server or of another
        interpreter can be called, and has an ``engine``, which you close.
    """
    from headrace.libraries.training import library_run

    found = find_policy(source, find_task(env), library=library, trust=trust)
    with library_run(seed=None if env is None else env.seed) if found.kind == "library" else nullcontext():
        return build_policy(
            found, env, horizon=horizon, mapping=mapping, deterministic=deterministic, trust=trust, device=device
        )


def find_policy(
    source: PolicySource,
    task: str | None,
    *,
    library: str | None = None,
    trust: bool = False,
    newest: bool = False,
    any_task: bool = True,
) -> FoundPolicy:
    """Find a policy before environments are made; one that is damaged, or of another task or library, is refused.

    Args:
        source: as for :func:`load_policy`.
        task: what it must be of; None where it is not known.
        library: of its checkpoint; None for any.
        trust: as for :func:`load_policy`.
        newest: None as ``source`` stands for the newest training in ``runs/``, if there is one.
        any_task: a chunk policy may be of another task, whose settings it then does not bring.
    """
    if isinstance(source, RemoteCfg):
        return FoundPolicy(source=source, kind="remote")
    if source is not None and not isinstance(source, (str, Path)):
        return FoundPolicy(source=source, kind="object")
    text = None if source is None else str(source)
    if text is None and task == _WORDS:
        return FoundPolicy(source=PusherWordsPolicy(), kind="object")
    if text is not None and text.partition("://")[0] in _SERVERS and "://" in text:
        remote = RemoteCfg(text, api_key=os.environ.get("HEADRACE_API_KEY") or None)
        return FoundPolicy(source=remote, kind="remote")
    if text is not None and text.startswith(_FOREIGN):
        from headrace.policies.foreign import ForeignPolicy

        return FoundPolicy(source=ForeignPolicy.parse(text), kind="foreign")
    if text is not None and (text.startswith(_LEROBOT) or _is_lerobot(Path(text))):
        from headrace.policies._lerobot import load_lerobot_policy

        return FoundPolicy(source=load_lerobot_policy(text.removeprefix(_LEROBOT)), kind="object")
    known = text is None or text in ("latest", "best", "published") or "://" in text or Path(text).exists()
    if text is not None and not known and text not in list_shipped_policies():
        if ":" in text:
            return FoundPolicy(source=cast("PolicyLike", load_made(text, "--policy")), kind="object")
        raise _missing(text)
    return _inspect(_find_file(text, task, library, newest=newest), task, library, trust=trust, any_task=any_task)


def build_policy(
    found: FoundPolicy,
    env: AnyEnv | EnvRecipe | None,
    *,
    horizon: int | None = None,
    mapping: ObservationMap | None = None,
    deterministic: bool = True,
    trust: bool = False,
    device: str = "cpu",
) -> ChunkPolicy:
    """Load what :func:`find_policy` found; the checkpoint of a training within ``library_run``."""
    size = None if env is None or isinstance(env, EnvRecipe) else count_actions(env.single_action_space)
    if found.kind == "remote":
        return _connect(cast("RemoteCfg", found.source), env, size, horizon, mapping)
    if found.kind == "foreign":
        from headrace.policies.batching import Batching
        from headrace.policies.foreign import ForeignEngine

        known = None if isinstance(env, EnvRecipe) else env
        return ForeignEngine(
            cast("ForeignPolicy", found.source), known, Batching(), horizon=horizon, mapping=mapping
        ).policy
    if mapping is not None:
        from headrace.policies.observation_map import map_policy

        plain = build_policy(found, env, horizon=horizon, deterministic=deterministic, trust=trust, device=device)
        return map_policy(plain, mapping)
    if found.kind == "object":
        return as_chunk_policy(cast("PolicyLike", found.source), horizon=horizon, action_dim=size, single=True)
    if found.kind == "chunk":
        policy = read_policy(found.path).to(device)
        return policy if size is None and horizon is None else as_chunk_policy(policy, horizon=horizon, action_dim=size)
    from headrace.policies.step_policy import load_step_policy

    if env is None:
        raise ConfigError(f"{found.path}: expected an environment to play it in, got none; pass env=")
    return load_step_policy(found, env, deterministic=deterministic, trust=trust)


def list_shipped_policies() -> dict[str, dict[str, object]]:
    """Return the chunk policies in the package: task → name, file, sha256, made_by, score."""
    entries = read_published().items()
    return {str(entry["task"]): {"name": name, **entry} for name, entry in entries if entry["library"] == SHIPPED}


def strip_name(task: str) -> str:
    """Return the name that published checkpoints have: without a module or namespace before it, or ``-Play`` behind."""
    return re.split(r"[:/]", task)[-1].removesuffix("-Play")


def find_task(env: AnyEnv | EnvRecipe | None) -> str | None:
    """Return the name of the task of an environment that was made from a name or recipe."""
    recipe = env if isinstance(env, EnvRecipe) else cast("EnvRecipe | None", getattr(env, "recipe", None))
    return None if recipe is None else recipe.source


def _is_lerobot(path: Path) -> bool:
    """Whether a directory is a checkpoint of LeRobot, or that of a step above it."""
    return any((path / below / "config.json").is_file() for below in ("", "pretrained_model"))


def _missing(name: str) -> Exception:
    path = Path(name)
    if path.suffix or len(path.parts) > 1:
        is_file = "/" in name or path.suffix in (".onnx", ".pt", ".pth", ".zip")
        meant = "module:name" if is_file else re.sub(r"\.(?=\w+$)", ":", name)
        return ConfigError(
            f"policy (--policy): expected a file, or a task that ships with one, got {name!r}: no such file; a "
            f"function or class is named as {meant!r}, a checkpoint of LeRobot by its directory"
        )
    hint = "; a function or class is named as module:NAME, a checkpoint of LeRobot as lerobot:DIR"
    return UnknownNameError("policy (--policy)", name, list_shipped_policies(), hint)


def _find_file(wanted: str | None, task: str | None, library: str | None, *, newest: bool) -> FoundPolicy:
    """Return the file that a name stands for, not looked into."""
    if wanted in ("latest", "best") or (wanted is None and newest):
        which = wanted or "latest"
        for found in _of_runs(which, _require_task(task, which), library):
            return found
        if wanted is not None:
            whose = f" with {library}" if library else ""
            raise ConfigError(
                f"--policy {wanted}: no training of {task!r}{whose} in 'runs'; "
                "train one with 'headrace train', or give a file with --policy"
            )
    if wanted is None or wanted == "published":
        return _find_published(_require_task(task, "published"), library)
    if "://" in wanted:
        return FoundPolicy(source=_fetch(wanted), kind="library", uri=hide_secrets(wanted))
    path = Path(wanted)
    if path.is_dir():
        from headrace.libraries.training import read_index

        path = read_index(path).last
    if not path.exists() and wanted in (shipped := list_shipped_policies()):
        return FoundPolicy(source=find_published_file(str(shipped[wanted]["name"])), kind="chunk", origin="published")
    return FoundPolicy(source=path, kind="library")


def _require_task(task: str | None, what: str) -> str:
    if task is None:
        raise ConfigError(f"--policy {what}: expected an environment that was made from a name or recipe; name a file")
    return task


def _inspect(found: FoundPolicy, task: str | None, library: str | None, *, trust: bool, any_task: bool) -> FoundPolicy:
    """Return what a file is; raises an error if it is damaged, of another library or of another task."""
    if found.kind == "chunk":  # one that ships by the name of its task, whose hash was checked
        return found
    from headrace._published import read_weights
    from headrace.libraries.training import read_meta, recognize

    path = found.path
    kind, spec = recognize(path, trust=trust)
    if kind == "onnx":
        require_extra("onnxruntime", extra="onnx", purpose=f"playing {path.name}")
    if kind == "torchscript" and not trust:
        raise DataError(
            f"{path}: a TorchScript file has code that is run when it is loaded and played, and can write files. If "
            "you trust its author, pass play --trust-checkpoint, or headrace.load_policy(…, trust=True)"
        )
    if kind in ("torchscript", "onnx"):
        return replace(found, kind=kind)
    own = None if spec is None else spec.name
    meta = None if spec is None else read_meta(path, spec, trust=trust)
    if library is not None and own != library:
        raise ConfigError(f"{path}: expected a checkpoint of {library}, got one of {own or 'a chunk policy'}")
    if spec is not None:
        spec.require()
    content = read_weights(path, trust=trust, mapped=True) if kind == "chunk" or own == "headrace" else {}
    said = meta.task if meta is not None else cast("str | None", content.get("task"))
    overrides = dict(content.get("overrides") or {} if meta is None else meta.overrides)
    same = said is None or task is None or strip_name(said) == strip_name(task)
    if not same and (kind != "chunk" or not any_task):
        raise ConfigError(f"{path}: expected a checkpoint of task {task!r}, got one of {said!r}; play that task")
    return replace(found, kind=kind, library=own, meta=meta, overrides=overrides if same else {})


def _find_published(task: str, library: str | None) -> FoundPolicy:
    """Return the checkpoint in the package for a task: of ``library``, or our own learner's, or any there is."""
    name = strip_name(task)
    entries = {
        key: entry
        for key, entry in read_published().items()
        if entry["task"] == name and library in (None, entry["library"])
    }
    if not entries:
        whose = f" with {library}" if library else ""
        known = ", ".join(sorted({*(str(entry["task"]) for entry in read_published().values()), _WORDS}))
        raise ConfigError(
            f"--policy: expected one, since we ship none for {name!r}{whose}, only for {known}; pass module:name, "
            "lerobot:DIR, or a checkpoint of 'headrace imitate' or 'headrace train'"
        )
    order = ("headrace", SHIPPED)
    key = min(entries, key=lambda key: (order.index(lib) if (lib := entries[key]["library"]) in order else 9, key))
    score: object = entries[key].get("score")
    value = cast("dict[str, object]", score).get("value") if isinstance(score, dict) else score
    return FoundPolicy(
        source=find_published_file(key),
        kind="chunk" if entries[key]["library"] == SHIPPED else "library",
        origin="published",
        score=float(value) if isinstance(value, (int, float)) else None,
    )


def _fetch(uri: str) -> Path:
    """Copy what a URI names to a local file, each time; http and https, and every file system that fsspec has."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "checkpoints"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", hide_secrets(uri).rsplit("/", 1)[-1]) or "checkpoint"
    path = cache / hashlib.sha256(uri.encode()).hexdigest()[:16] / name
    write_whole(path, lambda part: _download(uri, part))
    return path


def _download(uri: str, path: Path) -> None:
    hint = "check the address, or give a local file"
    if uri.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(uri, timeout=_TIMEOUT) as answer, path.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (OSError, HTTPException) as error:  # URLError is an OSError
            raise DataError(f"{hide_secrets(uri)}: cannot be fetched: {hide_secrets(str(error))}; {hint}") from None
        return
    import fsspec

    try:
        with fsspec.open(uri, "rb") as source, path.open("wb") as file:
            shutil.copyfileobj(cast("Any", source), file)
    except Exception as error:  # noqa: BLE001  # every file system of fsspec raises kinds of its own
        raise DataError(f"{hide_secrets(uri)}: cannot be fetched: {hide_secrets(str(error))}; {hint}") from None


def _of_runs(which: Literal["latest", "best"], task: str, library: str | None) -> Iterator[FoundPolicy]:
    """Yield the latest or best training of a task in ``runs/``, if there is one."""
    from headrace.libraries.training import INDEX, read_index

    kept: list[tuple[Path, Kept]] = []
    broken: list[str] = []
    for index in sorted(Path("runs").glob(f"*/{INDEX}"), key=lambda path: _natural(path.parent.name)):
        try:
            run = read_index(index.parent)
        except DataError as error:  # one broken run must not keep the others from being played
            broken.append(str(error))
            continue
        if run.task == task and library in (None, run.library) and run.last.is_file():
            kept.append((index.parent, run))
    if not kept and broken:
        raise DataError(f"no training of {task!r} can be read: {'; '.join(broken)}")
    if not kept:
        return
    if which == "latest":
        _, run = max(kept, key=lambda pair: (pair[1].saved_at, _natural(pair[0].name)))
        yield FoundPolicy(source=run.last, kind="library", origin="latest", score=run.score)
        return
    lowest = float("-inf")
    _, run = max(
        kept, key=lambda pair: (lowest if pair[1].best_score is None else pair[1].best_score, pair[1].saved_at)
    )
    yield FoundPolicy(source=run.best, kind="library", origin="best", score=run.best_score)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that puts run_10 after run_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _connect(
    remote: RemoteCfg,
    env: AnyEnv | EnvRecipe | None,
    action_dim: int | None,
    horizon: int | None,
    mapping: ObservationMap | None,
) -> ChunkPolicy:
    """Connect to a server; sizes that it does not state come from one answer."""
    from headrace.policies import RemoteEngine

    engine = RemoteEngine(remote, mapping=mapping, horizon=horizon, action_dim=action_dim)
    try:
        if engine.sizes.horizon is None and horizon is None and env is not None and not isinstance(env, EnvRecipe):
            env.reset(seed=getattr(env, "seed", 0))
            learned = engine.probe(env.observe([0]), env.instructions([0]))
            if learned.action_dim != action_dim:
                raise ConfigError(
                    f"policy {remote.address}: plans actions of {learned.action_dim}, the task has {action_dim}"
                )
        return engine.policy
    except BaseException:  # also Ctrl-C; raised again
        engine.close()
        raise
