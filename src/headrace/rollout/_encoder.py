"""What turns observation groups into features: running statistics for vectors, two convolutions for images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.rollout._groups import as_float_rows, channels_first, is_image


class Normalizer(nn.Module):
    """Running mean and variance of every element; buffers, so they are saved with the weights."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        start = {"mean": torch.zeros(size), "variance": torch.ones(size), "count": torch.tensor(1e-4).double()}
        for name, value in start.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Zero mean and unit variance, clamped to ±10."""
        return ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse, without the clamp."""
        return x * (self.variance + 1e-8).sqrt() + self.mean

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows (n, size) in, n at least 1."""
        share = len(rows) / (float(self.count) + len(rows))
        shift, spread = rows.mean(0) - self.mean, rows.var(0, unbiased=False) - self.variance
        self.mean += shift * share
        self.variance += (spread + shift.square() * (1 - share)) * share
        self.count += len(rows)


class ImageNormalizer(nn.Module):
    """Subtracts what all images have in common, and makes the channels independent and of equal variance.

    Two frames of a stack are almost the same image, and their small difference carries the velocity: as a channel of
    equal variance it is as easy to see as the image itself. Fitted once, on the first rollout.
    """

    mean: Tensor
    mix: Tensor
    fitted: Tensor

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(height, width, channels))
        self.register_buffer("mix", torch.eye(channels))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W); channels last in memory where the input is."""
        return ((images.movedim(1, -1) - self.mean) @ self.mix).movedim(-1, 1)

    @torch.no_grad()
    def update(self, images: Tensor) -> None:
        """Fit mean and mix to images (n, C, H, W)."""
        pixels = images.movedim(1, -1)
        self.mean.copy_(pixels.mean(0))
        rest = (pixels - self.mean).flatten(0, -2)
        spread, axes = torch.linalg.eigh((rest.T @ rest / len(rest)).double())
        # less than one gray level is not a signal
        self.mix.copy_(axes / (spread + 1e-5).sqrt())
        self.fitted.fill_(True)


class GroupEncoder(nn.Module):
    """Several observation groups as one row of features: each group's own, concatenated in the order of ``groups``.

    A vector is normalized. An image goes through two convolutions, and, with ``image_features``, through
    :class:`ImageNormalizer` before them and one layer after them.
    """

    def __init__(
        self, groups: Mapping[str, tuple[int, ...]], *, normalize: bool, image_features: int | None = None
    ) -> None:
        """Build the encoder of every group.

        Args:
            groups: name → shape of one row: (features,) or an image, (H, W, C) or (C, H, W).
            normalize: keep running statistics of vectors; otherwise they pass as they are.
            image_features: size of the layer behind the convolutions; None for no such layer.
        """
        super().__init__()
        self.names = tuple(groups)
        self._centered = image_features is not None
        self.encoders = nn.ModuleList()
        self.width = 0
        for shape in groups.values():
            if is_image(shape):
                encoder, width = _image_encoder(shape, image_features)
            else:
                encoder, width = Normalizer(shape[0]) if normalize else nn.Identity(), shape[0]
            self.encoders.append(encoder)
            self.width += width
        self.sees_images = any(map(is_image, groups.values()))

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Features (n, width) of groups (n, …)."""
        rows = [encoder(self._rows(obs[name])) for name, encoder in zip(self.names, self.encoders, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def update(self, obs: Mapping[str, Tensor], chosen: Tensor) -> None:
        """Let the statistics take in rows of every group.

        Args:
            obs: groups (T, N, …).
            chosen: bool (T, N): the rows to take in; at least one.
        """
        for name, encoder in zip(self.names, self.encoders, strict=True):
            first = encoder[0] if isinstance(encoder, nn.Sequential) else encoder
            if isinstance(first, Normalizer) or (isinstance(first, ImageNormalizer) and not bool(first.fitted)):
                first.update(self._rows(obs[name][chosen]))

    def _rows(self, rows: Tensor) -> Tensor:
        # as one product, since large images of whole rollouts come by here
        if self._centered and rows.dtype == torch.uint8:
            rows = rows.float().mul_(1 / 255).sub_(0.5)
        return as_float_rows(rows)


def _image_encoder(shape: tuple[int, ...], features: int | None) -> tuple[nn.Module, int]:
    channels, height, width = channels_first(shape)
    convolutions = nn.Sequential(nn.Conv2d(channels, 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU())
    if features is None:
        trunk = nn.Sequential(*convolutions, nn.Flatten())
        with torch.no_grad():
            return trunk, int(trunk(torch.zeros(1, channels, height, width)).shape[1])
    # torch's convolutions of small images run up to three times as fast with channels last
    convolutions = convolutions.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # not in its types
    trunk = nn.Sequential(ImageNormalizer(height, width, channels), convolutions, nn.Flatten())
    size = int(trunk(as_float_rows(torch.zeros(1, *shape))).shape[1])
    return trunk.extend([nn.Linear(size, features), nn.LayerNorm(features), nn.ELU()]), features
