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
    kernels: str  # digest of the device code


def folder() -> Path:
    return env.CACHE_DIR.get() / "tuned"


def save(place: Place, problem: str, split: Split | None, **facts: Any) -> Path | None:
    """Keep what was found for a problem (its ``repr``), with ``facts`` for people; None: nothing is better than mkernel's own choice.

    A folder that cannot be written costs a warning.
    """
    from mkernel.jit.cache import write_atomically

    key = hashlib.blake2b(repr((place, problem)).encode(), digest_size=12).hexdigest()
    path = folder() / f"{key}.json"
    try:
        if split is None:
            path.unlink(missing_ok=True)
            return None
        entry = {**dataclasses.asdict(place), "problem": problem, "split": _roles(split), **facts}
        write_atomically(path, (json.dumps(entry, indent=1) + "\n").encode())
        path.chmod(0o644)  # a cache may be shared
    except OSError as error:
        _log.warning("tuned splits %s: %s; set MKERNEL_CACHE_DIR to a folder that can be written", folder(), error)
        return None
    return path


def load(place: Place) -> dict[str, Split]:
    """Everything found at a place, by problem. A file that cannot be read or understood is left out, with a warning."""
    found = {}
    try:
        paths = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where HOME is
        _log.warning("tuned splits: %s; set MKERNEL_CACHE_DIR to a folder that can be read", error)
        return {}
    for path in paths:
        try:
            entry = json.loads(path.read_text())
            if all(entry[name] == value for name, value in dataclasses.asdict(place).items()):
                found[str(entry["problem"])] = _split(entry["split"])
        except Exception as error:  # whatever is wrong with it
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
