"""Persistent CUDA kernels that fuse NVLink communication, inter-node RDMA and dense compute in one launch.

Importing this package loads nothing heavy and has no side effect; every name below is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mkernel.version import VERSION

if TYPE_CHECKING:
    from mkernel.errors import (
        AbortedError,
        ArgumentError,
        CallError,
        CompileError,
        Error,
        MismatchError,
        PeerLostError,
        TimeoutError,  # noqa: A004
        TransportError,
    )
    from mkernel.ops.allgather_gemm import allgather_gemm
    from mkernel.ops.gemm_allreduce import gemm_allreduce
    from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
    from mkernel.ops.moe import Routing
    from mkernel.ops.moe_combine import moe_combine
    from mkernel.ops.moe_dispatch_gemm import Dispatched, moe_dispatch_gemm
    from mkernel.ops.moe_gemm_combine import moe_gemm_combine
    from mkernel.ops.moe_layer import moe_layer
    from mkernel.ops.plan import plan
    from mkernel.ops.prepared_plan import PreparedPlan
    from mkernel.ops.ring_attention import Attended, ring_attention
    from mkernel.ops.ring_attention_varlen import AttendedVarlen, ring_attention_varlen
    from mkernel.ops.split_search import TuneResult, tune
    from mkernel.ops.zigzag import zigzag_shard, zigzag_unshard
    from mkernel.planner.moe import RoutingError
    from mkernel.planner.ring_varlen import SequenceError
    from mkernel.planner.split import Split
    from mkernel.runtime.init import init
    from mkernel.runtime.launch import launch
    from mkernel.runtime.trace import Trace, trace
    from mkernel.runtime.traces import Traces
    from mkernel.runtime.workers.calls import shutdown
    from mkernel.runtime.world import World

__version__ = VERSION

_EXPORTS = {
    "AbortedError": "errors",
    "ArgumentError": "errors",
    "Attended": "ops.ring_attention",
    "AttendedVarlen": "ops.ring_attention_varlen",
    "CallError": "errors",
    "CompileError": "errors",
    "Dispatched": "ops.moe_dispatch_gemm",
    "Error": "errors",
    "MismatchError": "errors",
    "PeerLostError": "errors",
    "PreparedPlan": "ops.prepared_plan",
    "Routing": "ops.moe",
    "RoutingError": "planner.moe",
    "SequenceError": "planner.ring_varlen",
    "Split": "planner.split",
    "TimeoutError": "errors",
    "Trace": "runtime.trace",
    "Traces": "runtime.traces",
    "TransportError": "errors",
    "TuneResult": "ops.split_search",
    "World": "runtime.world",
    "allgather_gemm": "ops.allgather_gemm",
    "gemm_allreduce": "ops.gemm_allreduce",
    "gemm_reduce_scatter": "ops.gemm_reduce_scatter",
    "init": "runtime.init",
    "launch": "runtime.launch",
    "moe_combine": "ops.moe_combine",
    "moe_dispatch_gemm": "ops.moe_dispatch_gemm",
    "moe_gemm_combine": "ops.moe_gemm_combine",
    "moe_layer": "ops.moe_layer",
    "plan": "ops.plan",
    "ring_attention": "ops.ring_attention",
    "ring_attention_varlen": "ops.ring_attention_varlen",
    "shutdown": "runtime.workers.calls",
    "trace": "runtime.trace",
    "tune": "ops.split_search",
    "zigzag_shard": "ops.zigzag",
    "zigzag_unshard": "ops.zigzag",
}

__all__ = [
    "AbortedError",
    "ArgumentError",
    "Attended",
    "AttendedVarlen",
    "CallError",
    "CompileError",
    "Dispatched",
    "Error",
    "MismatchError",
    "PeerLostError",
    "PreparedPlan",
    "Routing",
    "RoutingError",
    "SequenceError",
    "Split",
    "TimeoutError",
    "Trace",
    "Traces",
    "TransportError",
    "TuneResult",
    "World",
    "allgather_gemm",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "init",
    "launch",
    "moe_combine",
    "moe_dispatch_gemm",
    "moe_gemm_combine",
    "moe_layer",
    "plan",
    "ring_attention",
    "ring_attention_varlen",
    "shutdown",
    "trace",
    "tune",
    "zigzag_shard",
    "zigzag_unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mkernel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mkernel.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
