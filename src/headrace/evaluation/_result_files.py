"""Evaluations as files, and several of them as one: parts of a plan are played anywhere, and the table is the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, cast

from headrace.errors import ConfigError, DataError
from headrace.evaluation._journal import FORMAT as JOURNAL
from headrace.evaluation._journal import (
    Header,
    check_same,
    common_values,
    join_ranges,
    parse_header,
    parse_row,
    read_journal,
    read_ranges,
    row_to_json,
)
from headrace.evaluation._result import Counters, EpisodeResult, Evaluation
from headrace.files import LINE_LIMIT, open_untrusted, read_json

_FORMAT = "headrace-evaluation-table-1"
_NEW = ("rows_verified", "rows_checking")
"""Counters that a file of 0.2 has not; none is written for a zero."""
_STATUSES = ("completed", "interrupted", "failed")


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """As :meth:`Evaluation.to_json`."""
    intervals = {name: getattr(evaluation, name) for name in ("success_rate", "mean_reward", "iqm_reward")}
    return {
        "format": _FORMAT,
        "identity": evaluation.identity,
        "circumstances": evaluation.circumstances,
        "plan": join_ranges(evaluation.plan),
        "status": evaluation.status,
        "strict_size": evaluation.strict_size,
        "fidelity": evaluation.fidelity,
        "seeded": evaluation.seeded,
        "given_up": list(evaluation.given_up),
        "summary": {
            "episodes": len(evaluation.episodes),
            "unfinished": evaluation.unfinished,
            **{name: None if found is None else found._asdict() for name, found in intervals.items()},
            "mean_length": evaluation.mean_length,
            "instructions": [
                {
                    "instruction": text,
                    "episodes": len(part.episodes),
                    "success_rate": part.success_rate and part.success_rate._asdict(),
                    "mean_reward": part.mean_reward and part.mean_reward._asdict(),
                }
                for text, part in evaluation.by_instruction().items()
            ],
        },
        "counters": {name: count for name, count in asdict(evaluation.counters).items() if count or name not in _NEW},
        "episodes": [row_to_json(episode) for episode in evaluation.episodes],
    }


def load(path: Path) -> Evaluation:
    """As :meth:`Evaluation.load`."""
    return _of_journal(path) if _is_journal(path) else _from_json(read_json(path), str(path))


def merge(parts: Sequence[tuple[str, Evaluation]]) -> Evaluation:
    """Return one table of evaluations of the same identity, each with its name for errors and warnings.

    An id that is in several must have equal rows; it is in the table once. Counters are added up where all have some.
    """
    if not parts:
        raise ConfigError("merge: expected at least one evaluation, got none")
    headers = [_header(name, part) for name, part in parts]
    for (name, _), header in zip(parts[1:], headers[1:], strict=True):
        check_same(headers[0], header, name)
    first = parts[0][1]
    episodes = join_rows_once((name, row) for name, part in parts for row in part.episodes)
    plan = tuple(sorted(set[int]().union(*[part.plan for _, part in parts])))
    status: Literal["completed", "interrupted", "failed"] = "completed"
    if len(episodes) < len(plan):
        status = "failed" if any(part.status == "failed" for _, part in parts) else "interrupted"
    return Evaluation(
        episodes=episodes,
        plan=plan,
        status=status,
        counters=total_counters([part.counters for _, part in parts]),
        strict_size=first.strict_size,
        fidelity=first.fidelity,
        identity=first.identity,
        circumstances=common_values([header.circumstances for header in headers]),
        given_up=tuple(sorted({i for _, part in parts for i in part.given_up} - {row.episode_id for row in episodes})),
    )


def join_rows_once(rows: Iterable[tuple[str, EpisodeResult]]) -> list[EpisodeResult]:
    """Each id once, in order; rows of an id that differ are refused. Each comes with the name of its source."""
    found: dict[int, EpisodeResult] = {}
    for name, row in rows:
        known = found.setdefault(row.episode_id, row)
        # as text, since a reward that is not a number does not equal itself
        if known is not row and repr(known) != repr(row):
            raise DataError(
                f"{name}: episode {row.episode_id} was played twice with different results, {row} and {known}; the "
                "policy or the environment is not a function of the episode, or batches were not strict"
            )
    return [found[episode] for episode in sorted(found)]


def _header(name: str, part: Evaluation) -> Header:
    if part.identity is None or part.circumstances is None:
        raise ConfigError(
            f"{name}: expected an evaluation with an identity, got one that names no policy; pass policy_id= "
            "(--policy-id), journal= or output= to evaluate"
        )
    return Header(identity=part.identity, circumstances=part.circumstances)


def total_counters(counters: Sequence[Counters]) -> Counters:
    """Return the sum; nothing where one is of a journal, which has none: a part of the cost would pass for all of
    it."""
    total = Counters()
    if not all(part.batch_steps for part in counters):
        return total
    for part in counters:
        for entry in fields(Counters):
            if entry.name != "stages":
                setattr(total, entry.name, getattr(total, entry.name) + getattr(part, entry.name))
        for stage, seconds in part.stages.items():
            total.stages[stage] = total.stages.get(stage, 0.0) + seconds
    return total


def _is_journal(path: Path) -> bool:
    """Whether the first line alone is an object of the journal's format."""
    try:
        with open_untrusted(path) as file:
            first: object = json.loads(file.readline(LINE_LIMIT))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and cast("dict[str, object]", first).get("format") == JOURNAL


def _of_journal(path: Path) -> Evaluation:
    content = read_journal(path)
    rows = join_rows_once((str(path), row) for row in content.rows)
    identity = content.header.identity
    return _check_rows(
        Evaluation(
            episodes=rows,
            plan=tuple(sorted(content.plan)),
            status="completed" if len(rows) == len(content.plan) else "interrupted",
            counters=Counters(),
            strict_size=identity.get("strict_size"),
            fidelity=identity.get("fidelity", "native"),
            identity=identity,
            circumstances=content.header.circumstances,
        ),
        str(path),
    )


def _from_json(data: dict[str, Any], name: str) -> Evaluation:
    if data.get("format") != _FORMAT:
        raise DataError(
            f"{name}: expected a saved evaluation ({_FORMAT!r}) or a journal ({JOURNAL!r}), got {data.get('format')!r}"
        )
    header = None if data.get("identity") is None else parse_header(data, name)
    rows: object = data.get("episodes")
    if data.get("status") not in _STATUSES or not isinstance(rows, list):
        raise DataError(f"{name}: expected a status of {_STATUSES} and a list of episodes; the file is damaged")
    try:
        counters = Counters(**{key: count for key, count in data["counters"].items() if key != "held_steps"})  # of 0.2
        return _check_rows(
            Evaluation(
                episodes=join_rows_once((name, parse_row(row, name)) for row in cast("list[object]", rows)),
                plan=tuple(sorted(read_ranges(data.get("plan"), name))),
                status=data["status"],
                counters=counters,
                strict_size=data["strict_size"],
                fidelity=data["fidelity"],
                seeded=bool(data.get("seeded", True)),
                given_up=tuple(int(episode) for episode in data["given_up"]),
                identity=None if header is None else header.identity,
                circumstances=None if header is None else header.circumstances,
            ),
            name,
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{name}: not a saved evaluation, or damaged: {error}") from error


def _check_rows(evaluation: Evaluation, name: str) -> Evaluation:
    """Refuse rows that were not planned: a count of what is missing would be wrong."""
    beyond = {episode.episode_id for episode in evaluation.episodes} - set(evaluation.plan)
    if beyond:
        raise DataError(
            f"{name}: expected rows of the plan only, got episodes {sorted(beyond)[:8]}; the file is damaged"
        )
    return evaluation
