"""Options of a world: what ``init`` and ``launch`` are asked for, completed from the environment, and checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.jit.cache import warn_once
from mkernel.planner.specialize import parse
from mkernel.runtime.integers import MANY, whole_number

__all__ = ["DEFAULT_ENTRY_TIMEOUT", "DEFAULT_TIMEOUT", "Options", "checked_fields"]

DEFAULT_TIMEOUT = 30.0  # seconds
DEFAULT_ENTRY_TIMEOUT = 600.0  # seconds
_MOST_BYTES = (1 << 47) - 1  # that a process can map


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Arguments of ``init`` that concern the world itself; the same on every rank."""

    target: str = "auto"
    ranks_per_node: int | None = None
    transport: str = "auto"
    heap_bytes: int | None = None
    max_sms: int | None = None
    batch_invariant: bool = False
    specialize: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    entry_timeout: float = DEFAULT_ENTRY_TIMEOUT

    def __post_init__(self) -> None:
        for name in ("timeout", "entry_timeout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
                raise ArgumentError(name, value, "must be a number of seconds greater than 0")
        for name, most in (("ranks_per_node", MANY), ("heap_bytes", _MOST_BYTES), ("max_sms", MANY)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, most, " or None"))
        if not isinstance(self.batch_invariant, bool):
            raise ArgumentError("batch_invariant", self.batch_invariant, "must be True or False")
        for name in ("target", "transport"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(name, getattr(self, name), "must be a name")

    @classmethod
    def resolve(cls, **arguments: Any) -> Options:
        """Arguments of ``init``: one that is left open (None, or as in ``_OPEN``) takes the environment's value, then the default."""
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        if arguments.keys() - known.keys():
            raise ArgumentError("init_options", sorted(arguments.keys() - known.keys()), "unknown", f"known are {', '.join(known)}")
        env.check_all()
        for name, near in env.ignored().items():
            warn_once(f"{name} is set, and no variable of mkernel: it is ignored" + (f" (did you mean {near}?)" if near else ""))
        if arguments.get("specialize") is not None:
            arguments["specialize"] = checked_fields(arguments["specialize"])
        given = {name: value for name, value in arguments.items() if value is not None and not _is_open(name, value)}
        told = {name: variable.get() for name, variable in _VARIABLES.items() if name not in given and variable.is_set()}
        return cls(**{**known, **told, **given})


def checked_fields(wanted: Any) -> str:
    """A caller's ``specialize=`` as one word. Raises ArgumentError."""
    try:
        return "default" if wanted == "default" else str(parse(wanted))
    except (TypeError, ValueError) as error:
        raise ArgumentError("specialize", wanted, str(error)) from None


_OPEN: dict[str, Any] = {"transport": "auto", "batch_invariant": False}  # what stands for None


def _is_open(name: str, value: Any) -> bool:
    return name in _OPEN and isinstance(value, type(_OPEN[name])) and bool(value == _OPEN[name])


# Options that the environment may give.
_VARIABLES: dict[str, env.Variable[Any]] = {
    "ranks_per_node": env.RANKS_PER_NODE,
    "transport": env.TRANSPORT,
    "heap_bytes": env.HEAP_BYTES,
    "max_sms": env.MAX_SMS,
    "batch_invariant": env.BATCH_INVARIANT,
    "specialize": env.SPECIALIZE,
    "timeout": env.TIMEOUT,
    "entry_timeout": env.ENTRY_TIMEOUT,
}
