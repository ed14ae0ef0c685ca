"""Splits that ``mk.tune`` found, kept beside the compiled kernels: one small JSON file each. Rank 0's are the world's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from mkernel import env
from mkernel.plan.split import COMMUNICATION_ROLES, Split

__all__ = ["Place", "decode", "encode", "folder", "load", "save"]

_log = logging.getLogger("mkernel")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a split was measured, and is the one to use. The shape of the world is part of every problem."""

    device: str
    sms: int
    transport: str


def folder() -> Path:
    return env.CACHE_DIR.get() / "tuned"


def save(place: Place, problem: str, split: Split, **facts: Any) -> Path | None:
    """Keep what was found for a problem (its ``repr``), with ``facts`` for people. A folder that cannot be written costs a warning."""
    from mkernel.jit.cache import write_atomically

    key = hashlib.blake2b(repr((place, problem)).encode(), digest_size=12).hexdigest()
    entry = {**dataclasses.asdict(place), "problem": problem, "split": _roles(split), **facts}
    path = folder() / f"{key}.json"
    try:
        write_atomically(path, (json.dumps(entry, indent=1) + "\n").encode())
    except OSError as error:
        _log.warning("tuned splits %s: %s; set MKERNEL_CACHE_DIR to a folder that can be written", folder(), error)
        return None
    return path


def load(place: Place) -> dict[str, Split]:
    """Everything found at a place, by problem. A file that cannot be read or understood is left out, with a warning."""
    found = {}
    for path in sorted(folder().glob("*.json")):
        try:
            entry = json.loads(path.read_text())
            if all(entry[name] == value for name, value in dataclasses.asdict(place).items()):
                found[str(entry["problem"])] = _split(entry["split"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("tuned split %s: %s: %s; delete it, and tune again", path, type(error).__name__, error)
    return found


def encode(table: dict[str, Split]) -> bytes:
    """For another rank."""
    return json.dumps({problem: _roles(split) for problem, split in table.items()}).encode()


def decode(data: bytes) -> dict[str, Split]:
    return {problem: _split(roles) for problem, roles in json.loads(data).items()}


def _roles(split: Split) -> dict[str, int]:
    return {role: sms for role in COMMUNICATION_ROLES if (sms := getattr(split, role)) is not None}


def _split(roles: dict[str, int]) -> Split:
    if not set(roles) <= set(COMMUNICATION_ROLES) or not all(type(sms) is int and sms >= 0 for sms in roles.values()):
        raise ValueError(f"not a number of SMs per role: {roles}")
    return Split(**roles)
