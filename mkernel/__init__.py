"""Persistent CUDA kernels that fuse NVLink communication, inter-node RDMA and dense compute in one launch.

Importing this package loads nothing heavy and has no side effect; every name below is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from mkernel.version import VERSION

if TYPE_CHECKING:
    from mkernel.errors import (
        AbortedError,
        ArgumentError,
        CompileError,
        Error,
        MismatchError,
        PeerLostError,
        TimeoutError,  # noqa: A004
        TransportError,
    )
    from mkernel.ops.allgather_gemm import allgather_gemm
    from mkernel.ops.call import PreparedPlan, plan
    from mkernel.ops.gemm_allreduce import gemm_allreduce
    from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
    from mkernel.ops.tuning import TuneResult, tune
    from mkernel.plan.split import Split
    from mkernel.runtime.assemble import init
    from mkernel.runtime.launch import launch
    from mkernel.runtime.trace import Trace, trace
    from mkernel.runtime.workers.calls import shutdown
    from mkernel.runtime.world import World

__version__ = VERSION

_EXPORTS = {
    "AbortedError": "errors",
    "ArgumentError": "errors",
    "CompileError": "errors",
    "Error": "errors",
    "MismatchError": "errors",
    "PeerLostError": "errors",
    "PreparedPlan": "ops.call",
    "Split": "plan.split",
    "TimeoutError": "errors",
    "Trace": "runtime.trace",
    "TransportError": "errors",
    "TuneResult": "ops.tuning",
    "World": "runtime.world",
    "allgather_gemm": "ops.allgather_gemm",
    "gemm_allreduce": "ops.gemm_allreduce",
    "gemm_reduce_scatter": "ops.gemm_reduce_scatter",
    "init": "runtime.assemble",
    "launch": "runtime.launch",
    "plan": "ops.call",
    "shutdown": "runtime.workers.calls",
    "trace": "runtime.trace",
    "tune": "ops.tuning",
}

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CompileError",
    "Error",
    "MismatchError",
    "PeerLostError",
    "PreparedPlan",
    "Split",
    "TimeoutError",
    "Trace",
    "TransportError",
    "TuneResult",
    "World",
    "allgather_gemm",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "init",
    "launch",
    "plan",
    "shutdown",
    "trace",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mkernel' has no attribute {name!r}")
    if name == "plan":
        return importlib.import_module("mkernel.plan")  # see _CallablePackage
    value = getattr(importlib.import_module(f"mkernel.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


class _CallablePackage(types.ModuleType):
    """``mkernel.plan`` is a public function and a subpackage: the one object is both."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("mkernel.ops.call").plan(*arguments, **options)


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        if name in _EXPORTS and isinstance(value, types.ModuleType):  # the import system binds a subpackage
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
