"""What the files of headrace 0.2 are compared by: rows, and hashes of decoded values. Used by 0.2 and by the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def digest(values: Any) -> str:
    """Return dtype, shape and a hash of the values of an array or tensor."""
    array = np.ascontiguousarray(values.contiguous().numpy() if isinstance(values, torch.Tensor) else values)
    return f"{array.dtype.str} {list(np.shape(values))} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


def rows_of(evaluation: Any) -> list[dict[str, Any]]:
    """Return the rows of an evaluation as JSON has them."""
    return [dataclasses.asdict(row) for row in evaluation.episodes]


def dataset_values(dataset: Any) -> dict[str, dict[str, str]]:
    """Return hashes of every array of every episode."""
    return {
        f"seed {episode.meta.seed}, episode {episode.meta.episode_id}": {
            name: digest(episode.read(name)) for name in episode.names
        }
        for episode in dataset
    }


def store_values(store: Any) -> dict[str, Any]:
    """Return hashes of what a replay store holds, and of the next two batches of each of its samplers."""
    found: dict[str, Any] = {"length": len(store), "indices": digest(store.indices())}
    for name, view in store.views.items():
        for number in range(2):
            batch = view.sample(6)
            for key in sorted(batch.keys(True, True), key=str):
                found[f"{name}, batch {number}, {key}"] = digest(batch[key])
    return found


def weights_of(folder: Path) -> dict[str, list[float]]:
    """Return sum and sum of magnitudes of every weight of the last checkpoint of a training, optimizer included."""
    (file,) = folder.glob("checkpoints/last.*")
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            content: Any = {
                name: torch.load(io.BytesIO(archive.read(name)), weights_only=True)
                for name in ("policy.pth", "policy.optimizer.pth")
            }
    else:
        content = torch.load(file, map_location="cpu", weights_only=True)
    return {path: [float(part.sum()), float(part.abs().sum())] for path, part in _floats(content, "")}


def _floats(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value.detach().double())] if value.is_floating_point() else []
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [found for key, part in parts for found in _floats(part, f"{path}/{key}")]


COMMANDS = (
    *(
        "tasks",
        "run",
        "view",
        "picture",
        "train",
        "play",
        "evaluate",
        "merge",
        "serve",
        "imitate",
        "runtime",
        "startup",
    ),
    *("compare", "sweep", "report", "demo", "doctor", "completion"),
    *("record export", "record verify", "record info", "record replay", "record merge"),
)


def options_of(main: Callable[[list[str]], object], command: str) -> list[str]:
    """Return the options that the help of a command names, such as ``--num-envs``."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    starts = re.findall(r"^  (-.*?)(?:  .*)?$", shown.getvalue(), re.MULTILINE)
    return sorted({option for start in starts for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", start)})
