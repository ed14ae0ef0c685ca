"""Splits that ``mk.tune`` found: one small JSON file each, beside the compiled kernels. All ranks use those of rank 0."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkernel import env
from mkernel.planner.split import COMMUNICATION_ROLES, Split

__all__ = ["TuningKey", "decode", "encode", "entries", "folder", "load", "save"]

_log = logging.getLogger("mkernel")


@dataclasses.dataclass(frozen=True, slots=True)
class TuningKey:
    """Where a split was measured, and is the one to use. The shape of the world is part of every problem."""

    device: str
    sms: int
    transport: str
    kernels: str  # digest of the device code


_KEY = tuple(field.name for field in dataclasses.fields(TuningKey))


def folder() -> Path:
    return env.CACHE_DIR.get() / "tuned"


def save(key: TuningKey, problem: str, split: Split | None, **facts: Any) -> Path | None:
    """Keep what was found under a name (``tuning_name``: a problem and a class of rows); None: nothing is better than mkernel's own choice.

    ``facts``: for people and `mkernel cache`: ``op``, ``asked`` (fields of the problem), ``rows`` (of the first operand: first and last).

    A folder that cannot be written costs a warning.
    """
    from mkernel.jit.cache import write_atomically

    name = hashlib.blake2b(repr((key, problem)).encode(), digest_size=12).hexdigest()
    path = folder() / f"{name}.json"
    try:
        if split is None:
            path.unlink(missing_ok=True)
            return None
        entry = {**dataclasses.asdict(key), "problem": problem, "split": _roles(split), **facts}
        write_atomically(path, (json.dumps(entry, indent=1) + "\n").encode())
        path.chmod(0o644)  # other users may read a shared cache
    except OSError as error:
        _log.warning("tuned splits %s: %s; set MKERNEL_CACHE_DIR to a folder that can be written", folder(), error)
        return None
    return path


def entries() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file that can be read, with what is in it; others are left out, with a warning."""
    try:
        paths = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where HOME is
        _log.warning("tuned splits: %s; set MKERNEL_CACHE_DIR to a folder that can be read", error)
        return
    for path in paths:
        try:
            entry = json.loads(path.read_text())
            _split(entry["split"])
            yield path, {name: entry[name] for name in (*_KEY, "problem", "split")} | entry
        except Exception as error:  # whatever is wrong with it
            _log.warning("tuned split %s: %s: %s; delete it, and tune again", path, type(error).__name__, error)


def load(key: TuningKey) -> dict[str, Split]:
    """Everything found at a key, by name. A file that cannot be read or understood is left out, with a warning."""
    here = dataclasses.asdict(key).items()
    return {str(entry["problem"]): _split(entry["split"]) for _, entry in entries() if here <= entry.items()}


def encode(table: dict[str, Split]) -> bytes:
    """The bytes by which rank 0 tells its splits to the others."""
    return json.dumps({problem: _roles(split) for problem, split in table.items()}).encode()


def decode(data: bytes) -> dict[str, Split]:
    return {problem: _split(roles) for problem, roles in json.loads(data).items()}


def _roles(split: Split) -> dict[str, int]:
    return {role: sms for role in COMMUNICATION_ROLES if (sms := getattr(split, role)) is not None}


def _split(roles: dict[str, int]) -> Split:
    if not set(roles) <= set(COMMUNICATION_ROLES) or not all(type(sms) is int and sms >= 0 for sms in roles.values()):
        raise ValueError(f"not a number of SMs per role: {roles}")
    return Split(**roles)
