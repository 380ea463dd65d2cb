"""Record what OpenVLA-OFT's loop makes of a picture, with TensorFlow 2.21: ``python oft_pictures.py OUT.npz``.

Written to a JPEG file and read back, resized with Lanczos' filter, nine tenths of the area cut from the middle. Two
forms: ``fast`` decodes as TensorFlow does by default, ``accurate`` with the transform that Pillow has.
"""

from __future__ import annotations

import sys

import numpy as np

SIZE, SMALL, AREA = 48, 32, 0.9


def picture() -> np.ndarray:
    """Return uint8 (SIZE, SIZE, 3): waves, a ramp and a checkerboard."""
    row, column = np.mgrid[:SIZE, :SIZE]
    waves = 127 + 90 * np.sin(row / 7 + column / 11), 127 + 90 * np.cos(row / 5 - column / 9)
    checked = (row * 3 + column * 5) % 256 * 0.5 + 60 * ((row // 8 + column // 8) % 2)
    return np.stack([*waves, checked], axis=-1).clip(0, 255).astype(np.uint8)


def main() -> None:
    """Write both forms."""
    import tensorflow as tf

    found, edge = {}, (1 - AREA**0.5) / 2
    for form, transform in (("fast", ""), ("accurate", "INTEGER_ACCURATE")):
        image = tf.io.decode_jpeg(tf.io.encode_jpeg(picture()), dct_method=transform)
        image = tf.image.resize(image, (SMALL, SMALL), method="lanczos3", antialias=True)
        image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
        whole = tf.image.convert_image_dtype(image, tf.float32)[None]
        box = [[edge, edge, 1 - edge, 1 - edge]]
        cut = tf.image.crop_and_resize(whole, box, [0], (SMALL, SMALL))
        found[form] = tf.image.convert_image_dtype(tf.clip_by_value(cut, 0, 1), tf.uint8, saturate=True).numpy()[0]
    np.savez_compressed(sys.argv[1], **found)


if __name__ == "__main__":
    main()
