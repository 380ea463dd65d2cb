"""What a report begins with: a few sentences, what was saved, films."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Saving(NamedTuple):
    """How much the usual way takes of something, and how much was taken here."""

    what: str
    usual_way: str
    usual: float
    ours: float
    unit: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        """The usual way, what it takes, what was taken here, and the share that was saved."""
        share = 1 - self.ours / self.usual
        return self.usual_way, f"{self.usual:,.0f}{self.unit}", f"{self.ours:,.0f}{self.unit}", f"{share:.0%}"


class Film(NamedTuple):
    """An mp4 file, which becomes part of the page."""

    path: Path
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The opening of a report."""

    sentences: Sequence[str]
    savings: Sequence[Saving] = ()
    films: Sequence[Film] = ()
