"""One call of any op: from arrays to a launch. What was worked out for these arrays before is used again."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mkernel.errors import ArgumentError
from mkernel.ops.op import Instance, Op
from mkernel.ops.schedule import choice_of, executable, keep
from mkernel.runtime import current
from mkernel.runtime.arrays.libraries import Crossing

if TYPE_CHECKING:
    from mkernel.runtime.arrays.libraries import Libraries, Library
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["BoundCall", "ask", "bound_call", "call", "hold", "named", "not_plain", "remember", "stream_of"]

T = TypeVar("T")

_MAX_BOUND = 512  # argument combinations remembered per world
_MAX_HELD = 4096  # and what is known of operands by themselves: weights of many layers


class BoundCall(NamedTuple):
    """Parameters of one kernel over particular arrays; ``after``: what is enqueued right behind it, on the stream that it is given."""

    executable: Executable
    parameters: ctypes.Structure
    after: Callable[[Any], None] | None = None


# One of all, without a function of Python in between.
bound_call: Callable[[tuple[Executable, ctypes.Structure, Callable[[Any], None] | None]], BoundCall]
bound_call = functools.partial(tuple.__new__, BoundCall)


def remember(world: World, key: tuple[Any, ...], value: T) -> T:
    """Keep what was worked out for ``key``, for the next call."""
    return keep(world.bound_calls, key, value, _MAX_BOUND)  # a program that makes more different calls in turn prepares each again


def hold(world: World, key: Hashable, value: T) -> T:
    """Keep in ``world.held`` what calls of other sizes need again."""
    return keep(world.held, key, value, _MAX_HELD)


def call(
    op: Op[Any],
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    *,
    world: World | None,
    out: Any,
    split: Any,
    stream: Any,
    kept: tuple[Any, ...] = (),
) -> Any:
    """One call of ``op``; ``options``: values of ``op.options``, in their order; ``kept``: the array that ``op.keeping`` fills, if any.

    The op's methods are called only for arguments not seen before. The world's lock is held throughout, so that what was bound is still
    right when it is launched, whatever other threads do.
    """
    w = current.current(world)
    with w.lock:
        libraries = w.backend.libraries
        home = libraries[type(operands[0])]
        queue = home.stream() if stream is None else w.backend.stream(stream)
        others: list[Library] = []
        keys: list[Any] = [op.name, options]
        views: Sequence[Any] = ()
        results: Sequence[Any] = ()
        written: Sequence[Any] = kept
        instance: Any = None
        try:
            for array in operands:
                if array is None:
                    keys.append(None)
                    continue
                library = libraries[type(array)]
                if library is not home:
                    others.append(library)
                keys.append(library.key(array))
            if out is None:
                asked = tuple(keys)
                known = w.bound_calls.get(asked)
                if known is None:
                    views, instance = ask(w, op, operands, options, keys[2:])
                    known = remember(w, asked, op.results(instance, views))
                results = [home.empty(shape, dtype, queue) for shape, dtype in known]
            else:
                results = (out,) if op.result is None else op.arrays_of(out)
            keys.append(split)
            written = [*results, *kept]
            for array in written:
                library = libraries[type(array)]
                if library is not home:
                    others.append(library)
                keys.append(library.key(array))
            key = tuple(keys)
            bound = w.bound_calls.get(key)
        except ArgumentError as error:
            names = *op.operands, *(op.names_of_results(len(results)) if results else ()), *op.beside
            raise named(error, w, names, (*operands, *written)) from None
        except TypeError as error:  # an option that cannot be hashed
            choice_of(split)
            _refuse(w, op, operands, options)
            raise not_plain(dict(zip(op.options, options, strict=True))) or error from None
        if bound is None:
            hidden, known = home.hides or bool(others), instance and (views, instance)
            bound = remember(w, key, _made(w, op, operands, options, keys, results, split, queue, hidden, known, kept))
        if stream is None and home.one_stream and (not others or _all_on(queue, others)):
            w.launch(bound.executable, bound.parameters, queue, bound.after)
        else:
            given = [a for a in operands if a is not None]
            crossing = Crossing(home, queue, stream is not None, given, kept if out is None else written)
            crossing.enter()
            w.launch(bound.executable, bound.parameters, queue, bound.after)
            crossing.leave()
        return results[0] if op.result is None else op.returned(results)


def _refuse(world: World, op: Op[Any], operands: Sequence[Any], options: Sequence[Any]) -> None:
    """Raise what the op says of such arguments, if it can: an option may not even be comparable."""
    try:
        ask(world, op, operands, options)
    except ArgumentError:
        raise
    except (TypeError, ValueError):
        pass


def named(error: ArgumentError, world: World, names: Sequence[str], arrays: Sequence[Any]) -> ArgumentError:
    """The error of an array as that of the first argument which is refused like it, by its name; any other error as it is."""
    for name, array in zip(names, arrays, strict=False) if error.argument == "array" else ():
        try:
            if array is not None or error.value == "NoneType":
                world.backend.libraries[type(array)].view(array)
        except ArgumentError as again:
            if again.argument == "array":
                return ArgumentError(name, again.value, again.rule, again.remedy)
    return error


def not_plain(options: Mapping[str, Any]) -> ArgumentError | None:
    """The error for an option that cannot be hashed, such as a list or an array; None where all can."""
    for name, value in options.items():
        try:
            hash(value)
        except TypeError:
            return ArgumentError(name, value, f"must be a plain value, not a {type(value).__name__}")
    return None


def ask(
    world: World, op: Op[Any], operands: Sequence[Any], options: Sequence[Any], keys: Sequence[Any] | None = None
) -> tuple[list[Any], Instance[Any]]:
    """Views of the operands, None of those left out, and what they ask for. Raises ArgumentError.

    ``keys``: of the operands, where they are known, and whatever follows them.
    """
    libraries, optional, views = world.backend.libraries, op.optional, list[Any]()
    try:
        for i, (name, array) in enumerate(zip(op.operands, operands, strict=True)):
            if array is None and name in optional:
                views.append(None)
            else:
                library = libraries[type(array)]
                views.append(library.view(array) if keys is None else library.seen(array, keys[i]))
    except ArgumentError as error:
        raise named(error, world, op.operands, operands) from None
    return views, op.instance(world, *views, **dict(zip(op.options, options, strict=True)) if options else {})


def _made(
    world: World,
    op: Op[Any],
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    keys: Sequence[Any],
    results: Sequence[Any],
    split: Any,
    queue: Any,
    hidden: bool,
    asked: tuple[Sequence[Any], Instance[Any]] | None,
    kept: tuple[Any, ...],
) -> BoundCall:
    """Parameters of a call that is not known. ``hidden``: keys may not say all of its arrays; ``asked``: what ``ask`` found, if known."""
    if world.attention:  # closed, maybe, since this thread waits for the lock; a call that is known is not launched
        world.check()
    libraries = world.backend.libraries
    if kept:
        views, instance = asked = asked or ask(world, op, operands, options, keys[2:])
        view, *made = (libraries[type(array)].view(array) for array in (*kept, *results))
        op.check_kept(instance, views, made, view)
        plain = _made(world, op, operands, options, keys[:-1], results, split, queue, hidden, asked, ())
        return plain._replace(after=op.keeping(world, plain.executable, views, view))
    form_of = op.form_of(keys)
    form = world.forms.get(form_of)
    if form is not None and (not hidden or _usual(libraries, (*operands, *results))):
        bound: BoundCall | None = form.bind(keys)
        if bound is not None:
            return bound
    views, instance = asked or ask(world, op, operands, options, keys[2:])
    of_results = keys[len(keys) - len(results) :]
    made = [libraries[type(array)].seen(array, key) for array, key in zip(results, of_results, strict=True)]
    op.check_results(instance, views, made)
    op.check_places(views, made)
    chosen = executable(world, op, instance, split, queue)
    bound = bound_call((chosen, op.bind(world, chosen, instance, views, made), None))
    if form is None and form_of is not None:
        form = op.form(world, instance, views, made, split)
        if form is not None:
            keep(world.forms, form_of, form, _MAX_HELD)
    return bound


def _usual(libraries: Libraries, arrays: Sequence[Any]) -> bool:
    """Whether all arrays are as those that were checked, in what their keys do not say."""
    return all(libraries[type(array)].usual(array) for array in arrays if array is not None)


def _all_on(queue: Any, libraries: Sequence[Library]) -> bool:
    """Whether all arrays of these libraries are in use on the stream of the call: then nothing is to be ordered."""
    return all(library.one_stream and library.stream() == queue for library in libraries)


def stream_of(world: World, arrays: Sequence[Any], stream: Any) -> Any:
    """The stream of a call on these operands, as the backend has resolved it."""
    backend = world.backend
    return backend.libraries[type(arrays[0])].stream() if stream is None and arrays else backend.stream(stream)
