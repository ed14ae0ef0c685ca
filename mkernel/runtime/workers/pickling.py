"""Functions, arguments, results and exceptions as bytes, by cloudpickle. The only file that imports it."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import inspect
import io
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from mkernel.errors import ArgumentError, Error

__all__ = [
    "dump_call",
    "dump_error",
    "dump_result",
    "dump_warning",
    "load_call",
    "load_error",
    "load_result",
    "load_warning",
    "to_host",
]

_DEPTH = 12  # levels that the search for an object that cannot be pickled descends
_REMEDY = "mk.launch on GPUs copies functions, what they refer to, and results between processes: make and use such objects inside one"


def dump_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments as bytes. Raises ArgumentError that names what cannot be pickled, Error without cloudpickle."""
    _pickler()
    try:
        return _dump((fn, args), _place_on_device)
    except Exception as error:
        for name, value in (("fn", fn), ("args", args)):
            where = _culprit(value, name, _place_on_device)
            if where:
                raise ArgumentError(name, _short(value), f"cannot be pickled: {where}: {_brief(error)}", _REMEDY) from error
        raise ArgumentError("fn", _short(fn), f"cannot be pickled: {_brief(error)}", _REMEDY) from error


def load_call(data: bytes, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and the arguments that ``dump_call`` was given. Raises ArgumentError."""
    try:
        fn, args = pickle.loads(data)
    except Exception as error:
        rule = f"cannot be unpickled on rank {rank}: {_brief(error)}"
        raise ArgumentError("fn and args", "...", rule, "what they refer to must be importable in a worker process too") from error
    return fn, args


def dump_result(result: Any, rank: int) -> bytes:
    """A rank's result as bytes, with device arrays copied to host memory. Raises ArgumentError that names what cannot be pickled."""
    try:
        return _dump(result, to_host)
    except Exception as error:
        where = _culprit(result, "result", to_host) or "result"
        raise ArgumentError("fn", f"result of rank {rank}", f"cannot be pickled: {where}: {_brief(error)}", _REMEDY) from error


def load_result(data: bytes, rank: int) -> Any:
    """The result that ``dump_result`` was given. Raises ArgumentError."""
    try:
        return pickle.loads(data)
    except Exception as error:
        rule = f"cannot be unpickled in the caller: {_brief(error)}"
        raise ArgumentError("fn", f"result of rank {rank}", rule, _REMEDY) from error


def dump_error(error: BaseException) -> bytes:
    """An exception, without its frames, as bytes; empty if it cannot be pickled (``load_error`` then makes another from its text)."""
    try:
        data = _dump(error.with_traceback(None), to_host)
        pickle.loads(data)  # loading finds out whether __init__ has arguments of its own
    except Exception:
        return b""
    return data


def load_error(data: bytes, summary: str) -> BaseException:
    """The exception of ``dump_error``, else an ``Error`` with its type and text."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:
        error = None
    return error if isinstance(error, BaseException) else Error(summary)


def dump_warning(message: Any, category: type[Warning]) -> bytes:
    """A warning as bytes; empty if it cannot be pickled."""
    try:
        return _dump((message, category), to_host)
    except Exception:
        return b""


def load_warning(data: bytes, text: str, plain_kind: str) -> tuple[Any, type[Warning]]:
    """The warning of ``dump_warning``, else its text as one of Python's own kinds."""
    try:
        message, category = pickle.loads(data)
    except Exception:
        return text, getattr(builtins, plain_kind)
    return message, category


def to_host(value: Any) -> Any:
    """``value``, or its copy in host memory where it is an array on a device: NumPy's, or a CPU tensor of torch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.is_cuda else value
    if hasattr(type(value), "__cuda_array_interface__"):
        if hasattr(value, "get"):  # CuPy's
            return value.get()
        import cupy

        return cupy.asarray(value).get()
    return value


def _place_on_device(value: Any) -> Any:
    """Pickle a torch tensor on a GPU by its values; it is unpickled on the GPU of the rank."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        return _Placed(value.detach().cpu())
    return value


class _Placed:
    """A pickle of a tensor that is unpickled on the current GPU."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _to_gpu, (self.tensor,)


def _to_gpu(tensor: Any) -> Any:
    return tensor.cuda()


def _same(value: Any) -> Any:
    return value


@functools.cache
def _pickler() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise Error(
            f"mk.launch on GPUs sends functions to its worker processes with cloudpickle, which cannot be imported ({error}): "
            "pip install cloudpickle (mkernel[cuda13] and mkernel[cuda12] bring it)"
        ) from error

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def __init__(self, file: io.BytesIO, replace: Callable[[Any], Any]) -> None:
            super().__init__(file, protocol=5)
            self._replace = replace

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)  # cloudpickle knows no subclasses of modules, such as mkernel itself
            replaced = self._replace(value)
            return super().reducer_override(value) if replaced is value else (_same, (replaced,))

    return Pickler


def _dump(value: Any, replace: Callable[[Any], Any]) -> bytes:
    kind = _pickler()
    file = io.BytesIO()
    kind(file, replace).dump(value)
    return file.getvalue()


def _culprit(value: Any, name: str, replace: Callable[[Any], Any], depth: int = 0) -> str:
    """The place in ``value``, and the type, of the first object that cannot be pickled; empty if all can be."""
    try:
        _dump(value, replace)
    except Exception:
        if depth < _DEPTH:
            for part_name, part in _parts(value, name):
                found = _culprit(part, part_name, replace, depth + 1)
                if found:
                    return found
        return f"{name} of type {type(value).__module__}.{type(value).__qualname__}"
    return ""


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"{name}[{_short(key)}]", part
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield f"{name}.{field}", getattr(value, field)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield f"{name}[{index}]", part
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield f"{name}.{entry.name}", getattr(value, entry.name, None)
    elif isinstance(value, functools.partial):
        yield f"{name}.func", value.func
        yield from _parts(value.args, f"{name}.args")
        yield from _parts(value.keywords, f"{name}.keywords")
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        for variable, part in {**used.globals, **used.nonlocals}.items():
            yield f"variable {variable!r} of {name}", part


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _brief(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
