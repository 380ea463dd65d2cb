"""One statistic of a bundle: what was measured, how often, how it was spread, and the samples themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from headrace.statistics import bootstrap_interval, wilson_interval

RESERVOIR = 2000
"""Samples that a statistic keeps at most; ``n`` and the moments are of all of them."""
_BLOCKS = 30
_QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}

Better = Literal["higher", "lower"]


class Record(BaseModel):
    """Base of every record in a bundle: unknown fields, NaN and infinity are refused; a record never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(Record):
    """An interval around an estimate."""

    low: float
    high: float
    level: float = 0.95
    method: Literal["block_bootstrap", "wilson"] = Field(
        description=(
            "block_bootstrap: of the mean, over up to 30 blocks of neighboring samples, since neighbors are alike; "
            "it tells the noise within this run, not between runs. wilson: of a rate."
        )
    )


class Percentiles(Record):
    """Of all samples, by linear interpolation."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


class Sampling(Record):
    """Which samples were kept."""

    rule: Literal["all", "reservoir"] = Field(
        description="reservoir: a uniform draw without replacement of `capacity` samples, in order of time"
    )
    capacity: int | None = None
    seed: int | None = None


class Statistic(Record):
    """A measured quantity. Missing is null: a statistic of nothing does not exist."""

    n: int | None = Field(description="number of samples; null only in bundles of schema 1.x, which did not keep it")
    mean: float
    std: float | None = Field(description="sample standard deviation (n - 1); null for one sample")
    peak: float | None = Field(description="the largest sample")
    minimum: float | None = None
    percentiles: Percentiles | None = None
    interval: Spread | None = Field(default=None, description="of the mean; null for fewer than two samples")
    samples: list[float] | None = None
    sampling: Sampling | None = None
    unit: str | None = None
    better: Better | None = Field(default=None, description="which direction is an improvement, for comparisons")

    @classmethod
    def of(
        cls, values: Iterable[float], *, unit: str | None = None, better: Better | None = None, seed: int = 0
    ) -> Self | None:
        """Return the statistic of samples in order of time; None for no samples at all. NaN and infinity are
        refused."""
        data = np.fromiter(values, dtype=np.float64)
        count = len(data)
        if not count:
            return None
        if not np.isfinite(data).all():
            bad = int((~np.isfinite(data)).sum())
            raise ValueError(f"Statistic: expected finite samples, got {bad} of {count} that are not; leave them out")
        kept, sampling = data, Sampling(rule="all")
        if count > RESERVOIR:
            chosen = np.random.default_rng(seed).choice(count, RESERVOIR, replace=False)
            kept, sampling = data[np.sort(chosen)], Sampling(rule="reservoir", capacity=RESERVOIR, seed=seed)
        quantiles = np.quantile(data, list(_QUANTILES.values()))
        return cls(
            n=count,
            mean=float(data.mean()),
            std=float(data.std(ddof=1)) if count > 1 else None,
            peak=float(data.max()),
            minimum=float(data.min()),
            percentiles=Percentiles(**dict(zip(_QUANTILES, map(float, quantiles), strict=True))),
            interval=_mean_interval(data) if count > 1 else None,
            samples=[float(value) for value in kept],
            sampling=sampling,
            unit=unit,
            better=better,
        )


class Proportion(Record):
    """A rate of whole things, such as episodes that succeeded."""

    rate: float
    successes: int | None = Field(description="null only in bundles of schema 1.x, which did not keep it")
    n: int | None = Field(description="null only in bundles of schema 1.x, which did not keep it")
    interval: Spread | None

    @classmethod
    def of(cls, successes: int, n: int) -> Self | None:
        """Return the rate with Wilson's interval; None where there was nothing to count."""
        if not n:
            return None
        rate = wilson_interval(successes, n)
        interval = Spread(low=rate.low, high=rate.high, method="wilson")
        return cls(rate=rate.value, successes=successes, n=n, interval=interval)


def _mean_interval(data: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread:
    """Percentile bootstrap over means of blocks."""
    blocks = np.array_split(data, min(len(data), _BLOCKS))
    found = bootstrap_interval(np.array([block.mean() for block in blocks]))
    return Spread(low=found.low, high=found.high, method="block_bootstrap")
