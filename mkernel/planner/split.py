"""How many SMs play each role."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

__all__ = ["COMMUNICATION_ROLES", "Split", "SplitError"]

COMMUNICATION_ROLES = ("intra_comm", "inter_send", "inter_reduce")


class SplitError(ValueError):
    """A split that does not fit the device or starves a role; ``rule`` says which."""

    def __init__(self, split: Split, rule: str, remedy: str) -> None:
        self.split, self.rule, self.remedy = split, rule, remedy
        super().__init__(f"{split}: {rule} ({remedy})")


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """SMs (CTAs: one per SM) per role; ``None`` leaves the number to the tuned (``mk.tune``), else the modelled choice.

    Where the named roles leave fewer SMs than that, the others share what is left. A communication CTA joins compute when its work is
    done, so ``compute`` counts those that compute from the start. ``intra_comm=0`` in ``allgather_gemm`` on one node: a warp of each
    computing CTA moves the data.

    Examples
    --------
    >>> import mkernel as mk
    >>> mk.Split(intra_comm=8)  # mkernel chooses the others
    Split(compute=None, intra_comm=8, inter_send=None, inter_reduce=None)
    >>> mk.Split(120, 8, 4, 0).total
    132
    """

    compute: int | None = None
    intra_comm: int | None = None
    inter_send: int | None = None
    inter_reduce: int | None = None

    def filled(self, other: Split) -> Split:
        """Roles that communicate and are ``None`` here take ``other``'s number."""
        return Split(self.compute, *(getattr(other if getattr(self, role) is None else self, role) for role in COMMUNICATION_ROLES))

    def complete(self, default: Split, sm_count: int, spared: Container[str] = (), step: int = 1) -> Split:
        """The split with every ``None`` filled in: communication roles from ``default``, then compute gets the SMs that are left.

        Where named roles leave fewer than ``default`` asks for, the others share what is left: how many ``default`` asks for depends on
        M, and what fits must not. ``spared``: roles that need no SM of their own. ``step``: SMs of each role are a multiple of it, in
        ``default``, too.

        Raises
        ------
        SplitError
            More SMs than there are, a role that is needed gets none, or a role that the op does not have gets some.
        """
        chosen: dict[str, int] = {}
        for role in COMMUNICATION_ROLES:
            wanted, needed = getattr(self, role), getattr(default, role) or 0
            chosen[role] = needed if wanted is None else wanted
            if not isinstance(chosen[role], int) or chosen[role] < 0:
                raise SplitError(self, f"{role} must be a number of SMs >= 0", "None lets mkernel choose")
            if needed and not chosen[role] and role not in spared:
                raise SplitError(self, f"{role} is needed here and gets no SM", f"give it at least 1, such as {needed}")
            if not needed and chosen[role]:
                raise SplitError(self, f"{role} has nothing to do in this op and world", "leave it at None or 0")
        if self.compute is not None and (not isinstance(self.compute, int) or self.compute < 1):
            raise SplitError(self, f"compute gets {self.compute} of {sm_count} SMs", "None lets mkernel choose")
        self._share(chosen, sm_count, step)
        left = sm_count - sum(chosen.values())
        compute = left if self.compute is None else self.compute
        if compute < 1:
            raise SplitError(self, f"compute gets {compute} of {sm_count} SMs", "give the other roles fewer")
        if compute > left:
            total = compute + sum(chosen.values())
            raise SplitError(self, f"asks for {total} SMs, the device has {sm_count}", f"at most {left} are left for compute")
        return Split(compute, chosen["intra_comm"], chosen["inter_send"], chosen["inter_reduce"])

    def _share(self, chosen: dict[str, int], sm_count: int, step: int) -> None:
        """Take SMs from the roles that are ``None`` here, always from the largest, until all fit or none has more than ``step``."""
        over = sum(chosen.values()) + (self.compute or step) - sm_count
        while over > 0:
            most = max((role for role in chosen if getattr(self, role) is None), key=chosen.__getitem__, default=None)
            if most is None or chosen[most] <= step:
                return
            chosen[most] -= step
            over -= step

    @property
    def total(self) -> int:
        return (self.compute or 0) + (self.intra_comm or 0) + (self.inter_send or 0) + (self.inter_reduce or 0)
