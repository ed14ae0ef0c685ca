"""Libraries of arrays: where a call finds its operands' memory, on which stream they are in use, and who allocates results.

The library of a call's first operand decides: torch in, torch out, on torch's current stream. torch is found among the modules that the
program has loaded, never imported. docs/streams.md states the rules.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from mkernel.errors import ArgumentError
from mkernel.runtime.arrays.views import TensorView, view_of

__all__ = ["Crossing", "Device", "Libraries", "Library", "TorchLibrary"]


class Device(Protocol):
    """What libraries of arrays need of the device that they work on: a ``Backend``."""

    @property
    def libraries(self) -> Libraries: ...
    def key(self, array: Any) -> Hashable: ...
    def view(self, array: Any) -> TensorView: ...
    def stream(self, stream: Any) -> Any: ...
    def empty(self, shape: Sequence[int], dtype: str) -> Any: ...
    def torch_library(self, torch: Any) -> TorchLibrary: ...


class Library:
    """What calls on one device need to know of arrays of one kind. This class: arrays in the device's memory, on its streams.

    Attributes
    ----------
    one_stream
        All its arrays are in use on one stream at a time, ``stream()``; a call there has nothing to order.
    hides
        Keys do not say all that calls must know of its arrays: ``usual`` does.
    """

    one_stream = True
    hides = False

    def __init__(self, device: Device) -> None:
        self.device = device
        self.key = device.key  # as attributes: one call less on the path of every call

    def view(self, array: Any) -> TensorView:
        """Address, shape, strides and dtype of an array. Raises ArgumentError when the device cannot reach it."""
        return self.device.view(array)

    def seen(self, array: Any, key: Any) -> TensorView:
        """``view`` of an array whose key is known, and says most of it. Raises ArgumentError as that."""
        found: TensorView = key if type(key) is TensorView else self.view(array)
        return found

    def usual(self, array: Any) -> bool:
        """Whether an array, in all that its key does not say, is as those that ``seen`` takes, if one of such a key was taken."""
        return True

    def stream(self) -> Any:
        """The stream on which the library works now, in this thread."""
        return self.device.stream(None)

    def empty(self, shape: Sequence[int], dtype: str, stream: Any) -> Any:
        """A new array whose memory belongs to ``stream``."""
        return self.device.empty(shape, dtype)

    def enter(self, array: Any, stream: Any) -> None:
        """Make ``stream`` wait for what is being done to an operand."""

    def leave(self, array: Any, stream: Any, wait: bool) -> None:
        """After a call on ``stream``: what is done to an operand next waits for the call (``wait``), or it only stays alive so long."""


class Crossing:
    """One call whose operands are in use on other streams than its own, or may be: ``enter`` before the launch, ``leave`` after it."""

    def __init__(self, home: Library, stream: Any, explicit: bool, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """``home``: of the first operand; ``explicit``: the caller has named the stream; ``outs``: results that the caller has given."""
        libraries = home.device.libraries
        self._stream, self._explicit, self._home = stream, explicit, home
        self._operands = [(libraries[type(array)], array) for array in arrays]
        self._outs = [(libraries[type(array)], array) for array in outs]

    def enter(self) -> None:
        """Order the call after what its operands' libraries are doing."""
        for library, array in (*self._operands, *self._outs):
            library.enter(array, self._stream)

    def leave(self) -> None:
        """Order what its operands' libraries do next after the call; on a stream that the caller named, keep the operands' memory so long.

        A caller who names a stream orders what comes after the call, except for an ``out`` of another library, whose streams the caller
        does not see.
        """
        for library, array in self._operands:
            library.leave(array, self._stream, not self._explicit)
        for library, array in self._outs:
            library.leave(array, self._stream, not self._explicit or library is not self._home)


class Libraries(dict[type, Library]):
    """A dictionary from types of arrays to their libraries, because every call asks it."""

    def __init__(self, device: Device, others: Library, known: Sequence[tuple[type, Library]] = ()) -> None:
        super().__init__()
        self._device, self._others, self._known = device, others, list(known)
        self._torch: TorchLibrary | None = None

    def __missing__(self, kind: type) -> Library:
        found = next((library for base, library in self._known if issubclass(kind, base)), None)
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if found is None and tensor is not None and issubclass(kind, tensor):
            self._torch = self._torch or self._device.torch_library(sys.modules["torch"])
            found = self._torch
        self[kind] = found = found or self._others
        return found


class TorchLibrary(Library):
    """Tensors of torch on one device; on target cpu there are no streams."""

    hides = True

    def __init__(self, device: Device, torch: Any, place: str) -> None:
        """``place``: torch's name of the device, such as ``"cuda:0"``."""
        self.device, self._torch = device, torch
        self._place = torch.device(place)
        names = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
        self._dtypes = {name: getattr(torch, name) for name in names}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._strided = torch.strided
        self.key = self._key

    def _key(self, array: Any) -> Hashable:
        try:
            return array.data_ptr(), array.shape, array.stride(), array.dtype, array.get_device(), array.requires_grad
        except RuntimeError:  # no ordinary memory: the view says so
            return self.view(array)

    def view(self, array: Any) -> TensorView:
        if array.device != self._place:
            where = f"is on {array.device}, this rank works on {self._place}"
            raise ArgumentError("array", "Tensor", where, f"move it: .to({str(self._place)!r})")
        if array.requires_grad:
            rule = "requires a gradient, which this function does not give"
            raise ArgumentError("array", "Tensor", rule, "use that of mkernel.torch, or detach() it")
        if array.layout is not self._strided:
            raise ArgumentError("array", "Tensor", f"has layout {array.layout}", "use to_dense()")
        if array.is_neg() or array.is_conj():
            raise ArgumentError("array", "Tensor", "is a view that negates what lies in memory", "use resolve_neg()")
        try:
            address = array.data_ptr()
        except RuntimeError as error:
            raise ArgumentError("array", "Tensor", f"has no memory: {error}") from error
        return self._viewed(array, address, array.shape, array.stride(), array.dtype)

    def seen(self, array: Any, key: Any) -> TensorView:
        if type(key) is TensorView:
            return key
        address, shape, strides, dtype, _, requires_grad = key  # several kinds of device have the same ordinals
        if requires_grad or array.device != self._place or array.layout is not self._strided or array.is_neg() or array.is_conj():
            return self.view(array)  # which says what is wrong
        return self._viewed(array, address, shape, strides, dtype)

    def usual(self, array: Any) -> bool:
        # Only complex numbers can be conjugated, and their type is in the key.
        return array.device == self._place and array.layout is self._strided and not array.is_neg()

    def _viewed(self, array: Any, address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> TensorView:
        item, name = array.element_size(), self._names.get(dtype) or str(dtype).removeprefix("torch.")
        return view_of((address, tuple(shape), tuple([stride * item for stride in strides]), name, True))

    def empty(self, shape: Sequence[int], dtype: str, stream: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=self._dtypes[dtype], device=self._place)
