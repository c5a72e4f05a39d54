"""Screenshots as mean colors of blocks, compared with pictures that are kept with the tests.

A kept picture has a pixel for each block, so that it is small. Pages drawn in boxes (`box_font`)
differ little between browsers: what native controls look like, and rounded colors.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.browser import Page

Blocks = npt.NDArray[np.uint8]  # [rows, columns, 3]

SIDE = 8  # of a block, in pixels
STEP = 8  # of kept colors, of 255
FAR = 24  # of 255: colors that are farther apart differ; Chromium 150 and 156: in 4 blocks
MOST = 12  # blocks that may differ: a cell of a map has 10
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MEANS = """(async (png, side) => {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes]));
  const {width, height} = picture, columns = Math.floor(width / side);
  const context = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
  context.drawImage(picture, 0, 0);
  const means = [];
  for (let y = 0; y + side <= height; y += side) {
    const strip = context.getImageData(0, y, width, side).data;
    const sums = new Float64Array(3 * columns);
    for (let i = 0; i < strip.length; i += 4) {
      const column = Math.floor(i / 4 % width / side);
      for (let c = 0; c < 3 && column < columns; c++) sums[3 * column + c] += strip[i + c];
    }
    means.push(...sums.map((sum) => Math.round(sum / side ** 2)));
  }
  const text = means.map((mean) => String.fromCharCode(mean)).join("");
  return [columns, btoa(text)];
})"""


def blocks_of(page: Page, picture: bytes) -> Blocks:
    """Mean colors of the whole blocks of a PNG, which a blank page computes."""
    page.call("Page.navigate", url="about:blank")
    text = base64.b64encode(picture).decode()
    columns, means = page.run(f"{_MEANS}('{text}', {SIDE})")
    found = np.frombuffer(base64.b64decode(means), np.uint8)
    return found.reshape(-1, columns, 3)


def difference(found: Blocks, kept: Blocks) -> str:
    """How two screenshots differ, in words, or nothing if they look alike."""
    if found.shape != kept.shape:
        sizes = (f"{shape[1] * SIDE} x {shape[0] * SIDE}" for shape in (found.shape, kept.shape))
        return "{} pixels instead of {}".format(*sizes)
    far = np.abs(found.astype(int) - kept).max(axis=2) > FAR
    if far.sum() <= MOST:
        return ""
    rows, columns = (np.flatnonzero(far.any(axis=axis)) * SIDE for axis in (1, 0))
    return (
        f"{far.sum()} of {far.size} blocks of {SIDE} x {SIDE} pixels differ, "
        f"from ({columns[0]}, {rows[0]}) to ({columns[-1] + SIDE}, {rows[-1] + SIDE})"
    )


def keep(path: Path, blocks: Blocks) -> None:
    """Write blocks as a PNG of a pixel each."""
    rounded = np.minimum(np.round(blocks / STEP) * STEP, 255).astype(np.uint8)
    above = np.vstack([np.zeros_like(rounded[:1]), rounded[:-1]])
    lines = (rounded - above).reshape(len(rounded), -1)  # filter 2 of PNG, modulo 256
    body = zlib.compress(np.insert(lines, 0, 2, axis=1).tobytes(), 9)
    header = struct.pack(">2I5B", rounded.shape[1], rounded.shape[0], 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    path.write_bytes(_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ))  # fmt: skip


def kept_at(path: Path) -> Blocks:
    """Blocks that `keep` wrote."""
    text = path.read_bytes()
    width, height = struct.unpack_from(">2I", text, len(_SIGNATURE) + 8)
    start = text.index(b"IDAT")
    (length,) = struct.unpack_from(">I", text, start - 4)
    lines = np.frombuffer(zlib.decompress(text[start + 4 :][:length]), np.uint8)
    lines = lines.reshape(height, -1)[:, 1:]
    return np.cumsum(lines, axis=0, dtype=np.uint8).reshape(height, width, 3)
