"""A font whose letters are boxes of one size, so that pages look alike wherever they are drawn.

Machines have different fonts, in which texts have other widths and break elsewhere.
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

EM = 1000  # units of the font in the size of a text
ADVANCE, ASCENT, DESCENT = 550, 930, -240  # about those of usual fonts without serifs
BOX = (60, 0, 490, 520)  # left, bottom, right and top of a letter
SPACES = (0x20, 0xA0)
LAST = 0x2FFF  # of the characters that have a glyph


def configuration(folder: Path) -> Path:
    """Write the font, and a configuration of fontconfig that knows no other one."""
    (folder / "boxes.ttf").write_bytes(_font())
    path = folder / "fonts.conf"
    path.write_text(f"<fontconfig><dir>{folder}</dir><cachedir>{folder}/cache</cachedir>"
                    "</fontconfig>", encoding="utf-8")  # fmt: skip
    return path


def _font() -> bytes:
    """A TrueType file with the tables that FreeType needs."""
    left, bottom, right, top = BOX
    corners = ((left, bottom), (left, top), (right, top), (right, bottom))
    box = struct.pack(">5h", 1, *BOX) + struct.pack(">HH", len(corners) - 1, 0)
    box += bytes([1] * len(corners))  # each point is on the outline
    for axis in (0, 1):
        places = [0, *(corner[axis] for corner in corners)]
        box += struct.pack(">4h", *(b - a for a, b in itertools.pairwise(places)))
    box += bytes(-len(box) % 4)
    glyphs = (b"", box, b"")  # of what has no glyph, of a letter, of a space
    starts = [sum(map(len, glyphs[:place])) for place in range(len(glyphs) + 1)]
    name = "Boxes".encode("utf-16-be")
    groups = []
    first = SPACES[0]
    for space in (*SPACES, LAST + 1):
        if first < space:
            groups.append((first, space - 1, 1))
        if space <= LAST:
            groups.append((space, space, 2))
        first = space + 1
    cmap = struct.pack(">HHII", 13, 0, 16 + 12 * len(groups), 0)  # 13: many to one
    cmap += struct.pack(">I", len(groups)) + b"".join(struct.pack(">3I", *g) for g in groups)
    tables = {
        b"cmap": struct.pack(">HHHHI", 0, 1, 3, 10, 12) + cmap,
        b"glyf": b"".join(glyphs),
        b"head": struct.pack(">4I2H2q4h2H3h", 0x10000, 0x10000, 0, 0x5F0F3CF5, 0, EM, 0, 0,
                             *BOX, 0, 8, 2, 1, 0),
        b"hhea": struct.pack(">I3hH11hH", 0x10000, ASCENT, DESCENT, 0, ADVANCE, left,
                             ADVANCE - right, right, 1, *[0] * 7, len(glyphs)),
        b"hmtx": b"".join(struct.pack(">Hh", ADVANCE, left if g else 0) for g in glyphs),
        b"loca": struct.pack(f">{len(starts)}I", *starts),
        b"maxp": struct.pack(">I14H", 0x10000, len(glyphs), 4, 1, 0, 0, 2, *[0] * 8),
        b"name": struct.pack(">3H", 0, 2, 6 + 12 * 2)
        + b"".join(struct.pack(">6H", 3, 1, 0x409, what, len(name), 0) for what in (1, 4)) + name,
    }  # fmt: skip
    head = struct.pack(">I4H", 0x10000, len(tables), 128, 3, 16 * len(tables) - 128)
    at = len(head) + 16 * len(tables)
    body = b""
    for tag, table in tables.items():
        head += tag + struct.pack(">3I", 0, at + len(body), len(table))  # checksums are not read
        body += table + bytes(-len(table) % 4)
    return head + body
