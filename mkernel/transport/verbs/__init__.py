"""The boundary to verbs, the C interface of RDMA network cards.

interface.py: what transports need of a card, and what they hand to it.
pyverbs.py:   the real cards.
classic.py:   the same where providers lack newer functions. Only these two import pyverbs.
handles.py:   what their queue pairs are to libibverbs.
status.py:    the numbers that cards report, in words.
"""

from __future__ import annotations

from mkernel.transport.verbs.interface import (
    Access,
    Completion,
    CompletionQueue,
    Destination,
    Event,
    Handles,
    Limits,
    Nic,
    Port,
    QueuePair,
    Region,
    Remote,
    RetryPolicy,
    VerbsError,
)
from mkernel.transport.verbs.status import ERRNO_REMEDIES, EVENTS, FLUSHED, PORT_ERROR, STATUSES, SUCCESS

__all__ = [
    "ERRNO_REMEDIES",
    "EVENTS",
    "FLUSHED",
    "PORT_ERROR",
    "STATUSES",
    "SUCCESS",
    "Access",
    "Completion",
    "CompletionQueue",
    "Destination",
    "Event",
    "Handles",
    "Limits",
    "Nic",
    "Port",
    "QueuePair",
    "Region",
    "Remote",
    "RetryPolicy",
    "VerbsError",
]
