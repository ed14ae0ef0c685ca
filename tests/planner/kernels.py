"""Kernels of plans, whatever heights of tiles of swapped operands they are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

from mkernel.jit.spec import KernelSpec
from mkernel.planner.derived import replaced

__all__ = ["kind_of_kernel", "of_any_height"]


def kind_of_kernel(spec: KernelSpec) -> KernelSpec:
    """What kernels are alike in that differ in heights only."""
    return dataclasses.replace(spec, constants=tuple(constant for constant in spec.constants if constant[0] != "kHeights"))


def of_any_height(plan: Any) -> Any:
    """What plans are alike in that differ in heights only, and so perhaps in rows of tiles."""
    return replaced(plan, heights=(), swapped=int(plan.swapped > 0))
