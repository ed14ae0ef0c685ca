"""Plans that an earlier process has chosen: kept beside the kernels, so that preparing a problem again plans nothing.

What a plan is follows from the problem, the class of rows, the device, what the caller asks for, and the planner's code and constants. All
of that names the file. Plans of ops that are not mkernel's own are made again, since their code is unknown here. Plans are pickled: their
folder is trusted as that of the kernels is (``mkernel.jit.cache``), whose code runs here, too.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import importlib
import io
import logging
import pickle
import pkgutil
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.jit import cache
from mkernel.planner.derived import fields_of

if TYPE_CHECKING:
    from mkernel.ops.op import Op
    from mkernel.runtime.world import World

__all__ = ["CODE", "FOLDER", "code_digest", "keep", "may_be_known", "name_of", "recall"]

FOLDER = "plans"
# What plans are made by, and of: folders and files of the package.
CODE = ("planner", "ops", "jit/spec.py", "env.py")

_log = logging.getLogger("mkernel")


@functools.cache
def code_digest() -> str:
    """A digest of the files of ``CODE``: another one may mean other plans."""
    package, state = Path(env.__file__).parent, hashlib.sha256()
    for part in CODE:
        place = package / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = path.read_bytes()
            state.update(f"{path.relative_to(package)} {len(text)}\n".encode() + text)
    return state.hexdigest()


@functools.cache
def _planners() -> list[ModuleType]:
    package = importlib.import_module("mkernel.planner")
    return [importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__) if not each.ispkg]


def _constants() -> str:
    """What the planner's modules hold now: numbers, texts, and what is made of them."""
    found = []
    for module in _planners():
        found += [(module.__name__, name, value) for name, value in vars(module).items() if name[:2] != "__" and _is_plain(value)]
    return repr(found)


def _is_plain(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type) and all(_is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, (int, float, str))


def may_be_known(op: Op[Any]) -> bool:
    """Whether the op's code is mkernel's own, so that its digest says what plans are."""
    return type(op).__module__.partition(".")[0] == __name__.partition(".")[0]


def name_of(world: World, op: Op[Any], problem: Hashable, choice: tuple[Any, ...], specialize: str | None) -> str:
    """The file of a problem's plans, as a caller with this choice has them on this device."""
    machine = world.machine if op.modelled else None
    settings = env.PLANNER.get(), env.MACHINE.get(), env.SPECIALIZE.get()
    parts = (
        op.name,
        problem,
        choice,
        specialize,
        world.backend.sm_count,
        machine,
        settings,
        sys.version_info[:2],
        code_digest(),
        _constants(),
    )
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
    """Keeps the fields of dataclasses alone: ranks that are threads share plans, and work out derived properties meanwhile."""

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
