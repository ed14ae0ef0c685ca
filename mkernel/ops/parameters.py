"""Kernel parameters as bytes: many integers are packed at once, tensor maps are put where they belong."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from mkernel import abi

__all__ = ["MAP_BYTES", "NO_MAP", "map_places", "place_of", "surroundings"]

MAP_BYTES = 128  # of a tensor map
NO_MAP = bytes(MAP_BYTES)  # where a kernel reads none


def place_of(parameters: type[ctypes.Structure], first: str, last: str) -> tuple[int, struct.Struct]:
    """Where the integers from field ``first`` to ``last`` begin in a kernel's parameters, and what packs them.

    One packing of all of them takes a tenth of the time that as many assignments do. ``abi.Fields`` counts as its integers.
    """
    names: dict[str, Any] = {name: kind for name, kind, *_ in parameters._fields_}
    chosen = list(names)[list(names).index(first) : list(names).index(last) + 1]
    codes = {ctypes.c_uint32: "I", ctypes.c_uint64: "Q", abi.Fields: "6I8x"}
    packing = struct.Struct("=" + "".join(codes[names[name]] for name in chosen))
    begin = getattr(parameters, first).offset
    assert begin + packing.size == getattr(parameters, last).offset + ctypes.sizeof(names[last]), "no padding between them"
    return begin, packing


def surroundings(parameters: type[ctypes.Structure], at: int, packing: struct.Struct, *maps: str) -> tuple[bytes, bytes]:
    """Zeros before the integers that are packed, and between them and the tensor maps, which follow each other until the end.

    So parameters are put together by one ``bytes.join``, which takes less than writing pieces of them where they belong.
    """
    places = [getattr(parameters, name).offset for name in maps]
    assert places == list(range(places[0], ctypes.sizeof(parameters), MAP_BYTES)), "nothing between tensor maps, or after them"
    return bytes(at), bytes(places[0] - at - packing.size)


def map_places(parameters: type[ctypes.Structure], *names: str) -> list[slice]:
    """Where tensor maps lie in the bytes of a kernel's parameters."""
    return [slice(getattr(parameters, name).offset, getattr(parameters, name).offset + 128) for name in names]
