"""Plans that an earlier process has chosen: kept beside the kernels, so that preparing a problem again plans nothing.

What a plan is follows from the problem, the class of rows, the device, what the caller asks for and the planner's code, and nothing else,
so that all of that names the file. The plans are pickled: their folder is trusted as that of the kernels is (``mkernel.jit.cache``), whose
code runs here, too.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import io
import logging
import pickle
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.jit import cache
from mkernel.planner.derived import fields_of

if TYPE_CHECKING:
    from mkernel.ops.op import Op
    from mkernel.runtime.world import World

__all__ = ["CODE", "FOLDER", "keep", "name_of", "recall"]

FOLDER = "plans"
# What plans are made by, and of: folders and files of the package.
CODE = ("planner", "jit/spec.py", "env.py")

_log = logging.getLogger("mkernel")


@functools.cache
def _code_digest() -> str:
    package, state = Path(env.__file__).parent, hashlib.sha256()
    for part in CODE:
        place = package / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = path.read_bytes()
            state.update(f"{path.relative_to(package)} {len(text)}\n".encode() + text)
    return state.hexdigest()


def name_of(world: World, op: Op[Any], problem: Hashable, choice: tuple[Any, ...], specialize: str | None) -> str:
    """The file of a problem's plans, as a caller with this choice has them on this device."""
    machine = world.machine if op.modelled else None
    settings = env.PLANNER.get(), env.MACHINE.get(), env.SPECIALIZE.get()
    parts = op.name, problem, choice, specialize, world.backend.sm_count, machine, settings, sys.version_info[:2], _code_digest()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32] + ".plans"


def recall(name: str) -> dict[int, Any]:
    """The plan of each class of rows that ``keep`` was given under this name; empty if there are none."""
    data = cache.found(FOLDER, name, name.encode())
    try:
        return {} if data is None else dict(pickle.loads(data))
    except Exception as error:  # whatever a damaged pickle raises: plans are made again
        _log.warning("plans %s: %s; made again", name, error)
        return {}


class _Fields(pickle.Pickler):
    """Of dataclasses the fields alone: ranks that are threads share plans, and work out derived properties meanwhile."""

    def reducer_override(self, thing: Any) -> Any:
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
            return copyreg.__newobj__, (type(thing),), fields_of(thing)  # type: ignore[attr-defined]
        return NotImplemented


def keep(name: str, plans: Mapping[int, Any]) -> None:
    """Keep plans for processes to come. Where that is impossible they plan again."""
    data = io.BytesIO()
    _Fields(data, pickle.HIGHEST_PROTOCOL).dump(dict(plans))
    try:
        cache.keep(FOLDER, name, name.encode(), data.getvalue())
    except OSError as error:
        _log.debug("plans are not kept: %s", error)
