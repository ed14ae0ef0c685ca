"""A kernel in a GPU's memory, with everything its launches need prepared."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from mkernel.errors import ArgumentError, CompileError
from mkernel.jit.source import ENTRY
from mkernel.jit.spec import KernelSpec
from mkernel.memory.driver import call, check, driver, native
from mkernel.runtime.backend import Kernel

__all__ = ["Config", "CudaKernel"]

_pointer, _u32 = ctypes.c_void_p, ctypes.c_uint32


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _u32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", _u32 * 3),
        ("block", _u32 * 3),
        ("shared_bytes", _u32),
        ("stream", _pointer),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", _u32),
    ]


# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE, _CLUSTER, _EARLY = 2, 4, 6


class CudaKernel(Kernel):
    """A kernel in a GPU's memory, with everything its launches need prepared.

    Attributes
    ----------
    taken
        The type of parameters that the kernel was launched with last, whose size is right.
    """

    taken: type | None = None

    def __init__(self, spec: KernelSpec, cubin: bytes, sm_count: int, ordinal: int) -> None:
        """Load the kernel. The GPU's context is current."""
        from cuda.core import ObjectCode

        cuda = driver()
        self.spec = spec
        self._code = ObjectCode.from_cubin(cubin, name=spec.name)  # owns the module
        self._kernel = self._code.get_kernel(ENTRY)
        what = f"loading {spec.name} on GPU {ordinal}"
        function = call(cuda.cuKernelGetFunction(self._kernel.handle), what)
        call(cuda.cuFuncLoad(function), what)  # load now: a lazy load at the first launch would wait for kernels that wait for this one
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(cuda.cuFuncSetAttribute(function, attribute, spec.shared_bytes), f"{what}: {spec.shared_bytes} bytes of shared memory")
        per_sm = call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, spec.threads, spec.shared_bytes), what)
        if per_sm < 1:
            raise CompileError(f"{spec.name}: {spec.threads} threads with {spec.shared_bytes} bytes of shared memory do not fit an SM")
        self.function = int(function)
        self.argument_list = (_pointer * 1)()  # the struct travels by value: the driver copies it during the launch
        # All CTAs are resident at once, or the launch fails; or the kernel begins before the one before it has ended.
        residence = _Attribute(_EARLY if spec.early else _COOPERATIVE, value=(1,))
        clusters = [_Attribute(_CLUSTER, value=(spec.cluster, 1, 1))] if spec.cluster > 1 else []
        self._attributes = (_Attribute * (1 + len(clusters)))(residence, *clusters)
        self.config = Config((1, 1, 1), (spec.threads, 1, 1), spec.shared_bytes, None, self._attributes, len(self._attributes))
        self._max_ctas = int(per_sm) * sm_count
        if clusters:  # the SMs of one must be neighbours: some may be left over
            number = ctypes.c_int()
            launch = Config((spec.cluster, 1, 1), (spec.threads, 1, 1), spec.shared_bytes, None, ctypes.pointer(clusters[0]), 1)
            ask = native("cuOccupancyMaxActiveClusters", ctypes.POINTER(ctypes.c_int), _pointer, ctypes.POINTER(Config))
            check(ask(ctypes.byref(number), self.function, ctypes.byref(launch)), f"{what}: clusters of {spec.cluster}")
            self._max_ctas = min(self._max_ctas, number.value * spec.cluster)

    @functools.cached_property
    def launch_arguments(self) -> tuple[Any, tuple[Any, ...]]:
        """The grid within ``config``, and all arguments of cuLaunchKernelEx as ctypes has them: it converts numbers in every call."""
        place = _pointer.from_param
        return self.config.grid, (ctypes.byref(self.config), place(self.function), ctypes.byref(self.argument_list), None)

    def max_ctas(self) -> int:
        return self._max_ctas

    def take(self, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> Any:
        """Parameters as a struct of ctypes. Raises ArgumentError when they are not of the kernel's size."""
        struct: Any = parameters
        if not isinstance(parameters, ctypes.Structure):
            struct = (ctypes.c_char * len(parameters)).from_buffer_copy(parameters)
        if ctypes.sizeof(struct) != self.spec.parameter_bytes:
            rule = f"{self.spec.name} takes {self.spec.parameter_bytes}"
            raise ArgumentError("parameters", f"{ctypes.sizeof(struct)} bytes", rule)
        if struct is parameters:  # bytes have one type for every size
            self.taken = type(struct)
        return struct
