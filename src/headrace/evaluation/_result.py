"""What an evaluation found: a row per episode, and a summary with intervals."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.files import write_whole
from headrace.statistics import Interval, bootstrap_interval, wilson_interval

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EpisodeResult:
    """One finished episode."""

    episode_id: int
    seed: int
    reward: float
    """Undiscounted sum."""
    length: int
    success: bool | None
    diverged: bool
    instruction: str = ""
    """The text that the policy received; "" where there is none."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """What an evaluation cost. Filled while it runs."""

    model_calls: int = 0
    rows_inferred: int = 0
    """Rows given to the model for an environment."""
    rows_wasted: int = 0
    """Of these, rows that no environment waited for."""
    rows_padded: int = 0
    """Rows beyond these that only filled a batch up."""
    rows_verified: int = 0
    """Rows that were answered again alone and in another batch, with equal bits."""
    rows_checking: int = 0
    """Rows that were computed for that, padding included."""
    rows_discarded: int = 0
    """Answers for episodes that had ended meanwhile."""
    frames_drawn: int = 0
    env_steps: int = 0
    idle_steps: int = 0
    """Environment-steps in which an environment was suspended while others stepped."""
    batch_steps: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of physics, rendering, task code, resets, policy (beside the others where it overlaps) and waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of :func:`headrace.evaluate` and :func:`headrace.evaluation.evaluate`."""

    episodes: list[EpisodeResult]
    """In the order of their ids, whatever order they finished in."""
    plan: tuple[int, ...]
    """The ids that were asked for, in order."""
    status: Literal["completed", "interrupted", "failed"]
    counters: Counters
    strict_size: int | None
    """Rows of the strict batches that make rows independent of the batch; None where last bits may depend on it."""
    fidelity: str = "native"
    """How suspended environments were kept: ``native``, ``restore``, or ``hold``, whose results are not exact."""
    seeded: bool = True
    """Whether episodes are functions of (seed, id); if not, the rows are a sample that no other run repeats."""
    given_up: tuple[int, ...] = ()
    """Ids that ended the worker processes that played them, again and again; unfinished."""
    interrupt: KeyboardInterrupt | None = field(default=None, compare=False, repr=False)
    """What ended an interrupted evaluation: Ctrl-C, or the signal that a command was sent."""
    identity: dict[str, Any] | None = None
    """What decides the rows: source, overrides, seed, policy, lengths, strict size, …; equal in what is merged. None
    where the evaluation had neither ``journal`` nor ``policy_id``."""
    circumstances: dict[str, Any] | None = None
    """What should not change a row: number of environments, versions, processor. None as for :attr:`identity`."""

    @property
    def planned(self) -> int:
        """How many episodes were asked for."""
        return len(self.plan)

    @property
    def unfinished(self) -> int:
        """Episodes of the plan that are not in the table."""
        return self.planned - len(self.episodes)

    @property
    def success_rate(self) -> Interval | None:
        """With Wilson's 95 % interval; None where the task has no success measure.

        None, too, while the plan is not completed: episodes that end early are finished first, so that a rate over
        the finished ones leans to them, whatever its interval says. The rows in ``episodes`` are there.
        """
        known = [episode.success for episode in self.episodes if episode.success is not None]
        return wilson_interval(sum(known), len(known)) if known and not self.unfinished else None

    @property
    def mean_reward(self) -> Interval | None:
        """With a bootstrap 95 % interval; None while the plan is not completed, as for :attr:`success_rate`."""
        return None if self.unfinished else bootstrap_interval(self._rewards())

    @property
    def iqm_reward(self) -> Interval | None:
        """Interquartile mean with a bootstrap 95 % interval; None while the plan is not completed."""
        return None if self.unfinished else bootstrap_interval(self._rewards(), robust=True)

    @property
    def mean_length(self) -> float | None:
        """Steps per episode; None while the plan is not completed."""
        return None if self.unfinished else float(np.mean([episode.length for episode in self.episodes]))

    def by_instruction(self) -> dict[str, Evaluation]:
        """Return the episodes of each instruction, in alphabetical order; none while the plan is not completed, and
        where no episode has an instruction."""
        groups: dict[str, list[EpisodeResult]] = {}
        for row in sorted(self.episodes, key=lambda row: row.instruction) if not self.unfinished else ():
            groups.setdefault(row.instruction, []).append(row)
        return {
            text: replace(self, episodes=rows, plan=tuple(row.episode_id for row in rows), counters=Counters())
            for text, rows in (groups if any(groups) else {}).items()
        }

    @property
    def idle_share(self) -> float:
        """Of the slots that play an episode: the share that was suspended while others stepped."""
        counters = self.counters
        slots = counters.env_steps + counters.idle_steps
        return counters.idle_steps / slots if slots else 0.0

    @property
    def rows_per_row(self) -> float:
        """Rows that the model computed per row that an environment waited for: 1 where nothing was wasted."""
        counters = self.counters
        extra = counters.rows_wasted + counters.rows_padded + counters.rows_checking
        needed = counters.rows_inferred - counters.rows_wasted
        return 1 + extra / needed if needed else 1.0

    def save(self, path: str | Path) -> None:
        """Write everything to a new JSON file, whole or not at all; :meth:`load` reads it back to an equal value."""
        target = Path(path)
        if target.exists():
            raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
        content = self.to_json()
        # a line per row, which json writes an order of magnitude faster than indented
        rows = ",\n".join([json.dumps(row, ensure_ascii=False) for row in content.pop("episodes")])
        head = json.dumps(content, ensure_ascii=False, indent=1).removesuffix("\n}")
        write_whole(target, f'{head},\n "episodes": [\n{rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Read what :meth:`save` wrote, or the journal of an evaluation, which has rows and plan, but no counters."""
        from headrace.evaluation._result_files import load

        return load(Path(path))

    def to_json(self) -> dict[str, Any]:
        """Everything in the form of JSON, with the figures and their intervals under ``summary``."""
        from headrace.evaluation._result_files import to_json

        return to_json(self)

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as a table with a header, in place of what is there."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [entry.name for entry in fields(EpisodeResult)])
        writer.writeheader()
        writer.writerows(asdict(episode) for episode in self.episodes)
        write_whole(Path(path), text.getvalue())

    def _repr_html_(self) -> str:
        """Return :meth:`summary` for notebooks."""
        from rich.console import Console

        # without force_jupyter a notebook would show what is printed, too
        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False)
        console.print(self.summary())
        form = '<pre style="font-family: monospace; line-height: normal">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=form)

    def summary(self) -> Table:
        """Return the figures as a table to print; without the cost where nothing was played, as after a merge of
        journals."""
        from rich.markup import escape
        from rich.table import Table

        counters = self.counters
        table = Table(title=f"{len(self.episodes)} of {self.planned} episodes, {self.status}", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        if self.unfinished:
            table.add_row("unfinished", f"{self.unfinished:,}: no rates, since short episodes finish first")
        if self.given_up:
            shown = ", ".join(map(str, self.given_up[:8])) + (", …" if len(self.given_up) > 8 else "")
            table.add_row("given up", f"episodes {shown}: their workers died")
        if self.fidelity == "hold":
            table.add_row("fidelity", "hold: suspended environments drifted, results are not exact")
        if not self.seeded:
            table.add_row("episodes", "not functions of their ids: no other run repeats them")
        batches = "fast: last bits depend on the batch"
        if self.strict_size:
            batches = "strict, rows alone" if self.strict_size == 1 else f"strict, {self.strict_size} rows"
            if counters.batch_steps:
                known = counters.rows_verified
                batches += f"; verified: {known:,} rows" if known else "; not verified"
        for name, value in (
            ("batches", batches),
            ("success rate", format_percent(self.success_rate)),
            ("mean reward", format_number(self.mean_reward)),
            ("interquartile mean reward", format_number(self.iqm_reward)),
            ("mean length", "–" if self.mean_length is None else f"{self.mean_length:.1f}"),
        ):
            table.add_row(name, value)
        for text, part in self.by_instruction().items():
            figure = format_number(part.mean_reward) if part.success_rate is None else format_percent(part.success_rate)
            table.add_row(f"  {escape(text or '(none)')}", f"{figure}, {len(part.episodes):,} episodes")
        if not counters.batch_steps:
            return table
        for name, value in (
            ("model calls", f"{counters.model_calls:,}"),
            ("rows inferred", f"{counters.rows_inferred:,}"),
            ("  wasted; padding", f"{counters.rows_wasted:,}; {counters.rows_padded:,}"),
            ("rows computed per row needed", self._rows_figure()),
            ("camera frames drawn", f"{counters.frames_drawn:,}"),
            ("env-steps", f"{counters.env_steps:,}"),
            ("env-steps per second", f"{counters.env_steps / max(counters.seconds, 1e-9):,.0f}"),
            ("idle share of slots", f"{self.idle_share:.1%}"),
        ):
            table.add_row(name, value)
        for stage, seconds in counters.stages.items():
            table.add_row(f"  in {stage}", f"{seconds:.2f} s")
        table.add_row("seconds", f"{counters.seconds:.2f} s")
        return table

    def _rows_figure(self) -> str:
        """Return the figure; with a warning where more than half is wasted, and that costs a tenth of the time."""
        figure, spent = f"{self.rows_per_row:.2f}", self.counters.stages.get("policy", 0.0)
        wasted = spent * (1 - 1 / self.rows_per_row)
        if self.rows_per_row <= 1.5 or wasted <= 0.1 * self.counters.seconds:
            return figure
        return f"{figure}: {wasted:.1f} s of the model are wasted; set the rows of a batch (--batch-size)"

    def _rewards(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([episode.reward for episode in self.episodes], dtype=np.float64)


def format_percent(interval: Interval | None) -> str:
    """Return a rate with its interval in words."""
    return "–" if interval is None else f"{interval.value:.1%}  [{interval.low:.1%}, {interval.high:.1%}]"


def format_number(interval: Interval | None) -> str:
    """Return a number with its interval in words."""
    return "–" if interval is None else f"{interval.value:.2f}  [{interval.low:.2f}, {interval.high:.2f}]"
