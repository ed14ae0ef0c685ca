"""The generated source of one kernel: its constants, then the template that they instantiate. The same text for both targets."""

from __future__ import annotations

import textwrap

from mkernel.jit.spec import KernelSpec

__all__ = ["ENTRY", "render"]

ENTRY = "mkernel_entry"  # MK_KERNEL in kernels_src/ptx.cuh: one kernel per cubin, of a fixed name

_WIDTH = 140


def render(spec: KernelSpec) -> str:
    """At most 15 lines of C++ that instantiate ``kernels_src/ops/<spec.name>.cuh``.

    The launch figures of the spec join the constants (``kThreads``, ``kSharedBytes``, ``kParameterBytes``), so that the kernel can hold
    its own layout against them in a static_assert.

    Raises
    ------
    ValueError
        A name is no C++ identifier, appears twice with different values, or a value does not fit an unsigned 32-bit integer.
    """
    if not spec.name.isidentifier():
        raise ValueError(f"kernel name {spec.name!r}: must be an identifier, the stem of a header in kernels_src/ops")
    members = ", ".join(f"{name} = {value}u" for name, value in _constants(spec).items())
    lines = textwrap.wrap(f"static constexpr uint32_t {members};", _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    body = "\n".join("  " + line for line in lines)
    return f'#include "ptx.cuh"\nstruct Config {{\n{body}\n}};\n#include "{spec.name}.cuh"\n'


def _constants(spec: KernelSpec) -> dict[str, int]:
    launch = [("kThreads", spec.threads), ("kSharedBytes", spec.shared_bytes), ("kParameterBytes", spec.parameter_bytes)]
    if spec.cluster > 1:
        launch.append(("kCluster", spec.cluster))
    constants: dict[str, int] = {}
    for name, value in (*spec.constants, *launch):
        if not (name.isidentifier() and name.isascii()):
            raise ValueError(f"constant {name!r} of {spec.name}: must be an identifier")
        if not 0 <= value < 2**32:
            raise ValueError(f"constant {name} = {value} of {spec.name}: must fit an unsigned 32-bit integer")
        if constants.setdefault(name, int(value)) != value:
            raise ValueError(f"constant {name} of {spec.name}: both {constants[name]} and {value}")
    return constants
