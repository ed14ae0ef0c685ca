"""What a transport tells the compiled engine, and what it says when that engine meets trouble (``kernels_src/proxy/interface.hpp``).

The engine posts and polls by itself. Opening, asynchronous events, and the words of every failure stay with the transport.
"""

from __future__ import annotations

import abc
import ctypes
import enum
from collections.abc import Sequence

from mkernel.errors import TransportError
from mkernel.transport.base import Put

__all__ = ["Failed", "Kind", "Report", "Rule", "Setup", "Side", "Signal", "Target", "Trouble", "UnfitError"]

_u64 = ctypes.c_uint64
POLLED = 64  # completions a poll takes at most


class UnfitError(Exception):
    """The compiled engine cannot serve this transport, or this card; the text says why."""


class Kind(enum.IntEnum):
    null = 0
    rc = 1
    srd = 2
    striped = 3


class Signal(enum.IntEnum):
    atomic = 0
    write = 1
    imm = 2


class Trouble(enum.IntEnum):
    none = 0
    bad_put = 1
    too_long = 2
    two_channels = 3
    post = 4
    poll = 5
    failed = 6
    bad_message = 7
    receive = 8
    miscounted = 9
    unfit = 10
    protocol = 11


class Rule(enum.IntEnum):
    released = 0
    more = 1
    twice = 2
    fewer = 3
    window = 4
    length = 5
    flag_outside = 6


def _words(names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    return [(name, _u64) for name in names.split()]


class Target(ctypes.Structure):
    _fields_ = _words("rank heap heap_key signals signal_key barrier barrier_key route number queue_key credits")


class Setup(ctypes.Structure):
    _fields_ = _words(
        "kind ring batch post_send post_receive poll stored sends arrivals pairs targets num_peers queue_pairs signal heap heap_bytes"
        " heap_key signals signal_bytes scratch scratch_registered scratch_key max_message depth receives completions credits"
        " backlog window links num_links smallest unit rate report"
    )


class Failed(ctypes.Structure):
    _fields_ = _words("id status pair vendor_error")


class Report(ctypes.Structure):
    _fields_ = (
        *_words(
            "trouble link ticket pair code arrivals bytes imm rule channel sequence number limit num_failed outstanding arrived taken"
            " completed moved_ns nap_ns"
        ),
        ("failed", Failed * POLLED),
    )


class Side(abc.ABC):
    """A transport's side of the compiled engine. What it gives must live as long as this does."""

    @abc.abstractmethod
    def fill(self, setup: Setup) -> None:
        """Fill in everything but ``ring`` and ``batch``."""

    def explain(self, report: Report, put: Put) -> int:
        """Raise the error that the engine has met, or return the number of the link without which it goes on.

        ``put``: that of ``report.ticket``, if the trouble is one of a put.
        """
        raise self.miscounted(report)

    @staticmethod
    def miscounted(report: Report) -> TransportError:
        """The error for a put that completed and should not have."""
        return TransportError(f"ticket {report.ticket} completed, but is not in flight", op="poll", status="miscounted")

    @abc.abstractmethod
    def look(self, report: Report, under_way: list[int]) -> Sequence[int]:
        """Do what is due now and then; returns the numbers of links without which the engine goes on. Raises TransportError.

        ``under_way``: positions of the queue pairs with work.
        """
