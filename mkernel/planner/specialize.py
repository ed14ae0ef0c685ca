"""Which fields of a kernel's template are compiled in, and which come with every call (``kernels_src/fields.cuh``)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from mkernel import env

__all__ = ["ALL", "DYNAMIC", "FIELDS", "Specialized", "constants_of", "parse", "remark"]

FIELDS = env.SPECIALIZABLE  # extents of one rank's operands; CTAs per communication role
DYNAMIC = 0xFFFFFFFF  # kDynamic: the field's constant where it comes with the call
_CONSTANTS = {"n": ("kN",), "k": ("kK",), "split": ("kIntraComm", "kInterSend", "kInterReduce")}


class Specialized(frozenset[str]):
    """Fields that are compiled in. Its ``repr`` is the same in every process: a plan's says all of it, and ranks compare that."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Specialized({[name for name in FIELDS if name in self]})"

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return "all" if self == ALL else ",".join(name for name in FIELDS if name in self) or "none"


ALL = Specialized(FIELDS)


def parse(wanted: str | Iterable[str] | None, default: Specialized = ALL) -> Specialized:
    """The fields that are meant: ``"default"``, ``"all"``, ``"none"``, or names of ``FIELDS``, by comma or one by one.

    None: what ``MKERNEL_SPECIALIZE`` says. ``default``: the op's own choice, by measurement (docs/benchmarks.md).

    Raises
    ------
    ValueError
        There is no such field.
    """
    if wanted is None:
        wanted = env.SPECIALIZE.get()
    return _parsed(wanted if isinstance(wanted, str) else tuple(wanted), default)


@functools.cache
def _parsed(wanted: str | tuple[str, ...], default: Specialized) -> Specialized:
    if wanted == "default":
        return default
    if wanted == "all":
        return ALL
    if wanted == "none":
        return Specialized()
    names = [name.strip() for name in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise ValueError(f"{unknown[0]!r}: must be default, all, none, or of {', '.join(FIELDS)}")
    return Specialized(names)


def remark(specialize: frozenset[str], default: Specialized) -> str:
    """For the description of a plan: what is compiled in, unless that is as the op has it by default."""
    return "" if specialize == default else f", compiled in: {Specialized(specialize)}"


def constants_of(values: Mapping[str, int], specialize: frozenset[str]) -> dict[str, int]:
    """``values`` (constants of Config by name) where they are compiled in, else ``DYNAMIC``.

    A role without CTAs is compiled in either way: no schedule of the same op, mechanism and world gives it any, and its code is left out.
    """
    constants = dict(values)
    for field, names in _CONSTANTS.items():
        if field not in specialize:
            constants |= {name: DYNAMIC for name in names if constants[name] != 0}
    return constants
