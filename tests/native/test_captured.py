"""Addresses among captured parameters: found where they explain all differences, else refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern.errors import LaunchError
from tests.support import native

BYTES = [1 << 20, 1 << 33, 512]
ADDRESSES = [[(1 << 44) + (i << 40) + capture * ((i + 1) << 34) for i in range(3)]
             for capture in range(3)]  # fmt: skip
Field = int | tuple[int, int]  # a constant, or an operand and an offset into it


@pytest.fixture
def library() -> Iterator[Any]:
    with native.in_use() as module:
        yield module


def packed(fields: list[Field], capture: int, tail: bytes = b"") -> bytes:
    """Parameters as a library would pass them in one of three captures."""
    values = (x if isinstance(x, int) else ADDRESSES[capture][x[0]] + x[1] for x in fields)
    return struct.pack(f"<{len(fields)}Q", *values) + tail


def words(library: Any, captures: list[bytes]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = library.address_words(captures, ADDRESSES, BYTES)
    return found


fields = st.lists(
    st.integers(0, 2**64 - 1)
    | st.integers(0, 2).flatmap(lambda i: st.tuples(st.just(i), st.integers(0, BYTES[i] - 1))),
    max_size=40,
)


@given(fields=fields, tail=st.binary(max_size=7))
@settings(max_examples=200, deadline=None)
def test_addresses_are_found(fields: list[Field], tail: bytes) -> None:
    found = words(native.library(), [packed(fields, capture, tail) for capture in range(3)])
    assert found == [(8 * i, *x) for i, x in enumerate(fields) if not isinstance(x, int)]


@pytest.mark.parametrize(
    "values",
    [
        (7, 8, 9),  # a counter
        (7, 7, 8),  # the same twice
        tuple(ADDRESSES[c][1] >> 32 for c in range(3)),  # half of an address
        tuple(ADDRESSES[c][0] + BYTES[0] for c in range(3)),  # behind the operand
        tuple(ADDRESSES[c][2] - 16 for c in range(3)),  # before it
        tuple(ADDRESSES[c][0] + 64 * c for c in range(3)),  # an offset that changes
        (ADDRESSES[0][0], ADDRESSES[1][1], ADDRESSES[2][0]),  # of two operands
    ],
)
def test_what_is_no_address_is_refused(values: tuple[int, ...], library: Any) -> None:
    captures = [packed([5, (1, 0), value], capture) for capture, value in enumerate(values)]
    with pytest.raises(LaunchError, match="differ by more than addresses, at byte 16"):
        words(library, captures)


def test_a_differing_tail_and_other_sizes_are_refused(library: Any) -> None:
    with pytest.raises(LaunchError, match="at byte 8"):
        words(library, [packed([1], capture, bytes([capture])) for capture in range(3)])
    with pytest.raises(LaunchError, match="no fixed size"):
        words(library, [packed([1] * (1 + (capture == 2)), capture) for capture in range(3)])
