"""Looking at a dataset: a table of its episodes, and a contact sheet of their images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from headrace.errors import ConfigError, require_extra
from headrace.files import write_whole
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.fields import can_be_shown, enlarge, newest_rgb

if TYPE_CHECKING:
    from PIL import Image

_WORDS = {True: "yes", False: "no", None: "–"}


def episode_table(dataset: EpisodeDataset, *, limit: int = 20) -> Table:
    """Episodes with their outcome: the first ``limit`` rows, and a line of totals."""
    table = Table(title=escape(f"{dataset.path.name}: {dataset.info.source or 'episodes'}"))
    for name in ("seed", "episode", "steps", "return", "MB"):
        table.add_column(name, justify="right")
    table.add_column("success")
    for entry in dataset.entries[:limit]:
        episode = str(entry.episode_id) + (f" (try {entry.attempt + 1})" if entry.attempt else "")
        outcome = _WORDS[entry.success] + (", diverged" if entry.diverged else "")
        size = f"{entry.size / 1e6:.2f}"
        table.add_row(str(entry.seed), episode, str(entry.length), f"{entry.episode_return:.2f}", size, outcome)
    if len(dataset) > limit:
        table.add_row("", f"… {len(dataset) - limit} more", "", "", "", "")
    table.add_section()
    judged = [entry.success for entry in dataset.entries if entry.success is not None]
    share = f"{sum(judged)} of {len(judged)}" if judged else "–"
    megabytes = sum(entry.size for entry in dataset.entries) / 1e6
    returns = [entry.episode_return for entry in dataset.entries]
    mean = f"{np.mean(returns):.2f} mean" if returns else "–"
    table.add_row("", f"{len(dataset)} in all", str(dataset.steps), mean, f"{megabytes:.2f}", share)
    return table


def field_table(episode: Episode) -> Table:
    """Return what an episode of the dataset is made of."""
    table = Table(title="fields")
    for name in ("name", "dtype", "row", "rows"):
        table.add_column(name)
    for field in episode.fields:
        table.add_row(escape(field.name), str(field.dtype), str(field.shape), "T + 1" if field.with_first else "T")
    return table


def contact_sheet(
    dataset: EpisodeDataset, path: Path, *, camera: str | None = None, episodes: int = 8, frames: int = 8
) -> Path:
    """Return an image with a line for each episode: ``frames`` of its images, from the first to the last.

    Args:
        dataset: its first ``episodes`` are shown.
        path: PNG file to write.
        camera: which array; the first that has images where None.
        episodes: lines at most.
        frames: images in a line.
    """
    images = require_extra("PIL.Image", extra="record", purpose="a contact sheet")
    drawing = require_extra("PIL.ImageDraw", extra="record", purpose="a contact sheet")
    if not len(dataset):
        raise ConfigError(f"contact sheet: expected an episode in {dataset.path}, got none; record some first")
    stacks = {name: stack for name in dataset[0].names if (stack := dataset.info.stack(name)) is not None}
    cameras = sorted({*(field.name for field in dataset[0].fields if can_be_shown(field)), *stacks})
    chosen = camera or (cameras[0] if cameras else None)
    if chosen is None or chosen not in cameras:
        wanted = "images" if camera is None else f"images named {camera!r}"
        got = f"images {', '.join(cameras)}" if cameras else f"only {', '.join(sorted(dataset[0].names))}"
        raise ConfigError(
            f"contact sheet: expected {wanted} in the dataset (uint8, with 1, 3 or 4 channels), got {got}; record a "
            "camera"
        )

    def image(episode: Episode, row: int) -> NDArray[np.uint8]:
        """Return one image (H, W, 3); small ones are shown larger, so that the text beside them can be read."""
        return enlarge(newest_rgb(episode.read(chosen, row, row + 1), stacks.get(chosen)), 64)[0]

    lines = [dataset[number] for number in range(min(episodes, len(dataset)))]
    height, width = image(dataset[0], 0).shape[:2]
    margin = 14
    sheet: Image.Image = images.new("RGB", (frames * width, len(lines) * (height + margin)), "black")
    draw = drawing.Draw(sheet)
    for number, episode in enumerate(lines):
        meta, top = episode.meta, number * (height + margin)
        words = f"episode {meta.episode_id}  {meta.length} steps  return {meta.episode_return:.2f}"
        draw.text((2, top + 1), f"{words}  success {_WORDS[meta.success].replace('–', '-')}", fill="white")
        for column, row in enumerate(np.linspace(0, meta.length, frames).round().astype(int).tolist()):
            sheet.paste(images.fromarray(image(episode, row)), (column * width, top + margin))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    write_whole(path, content.getvalue())
    return path
