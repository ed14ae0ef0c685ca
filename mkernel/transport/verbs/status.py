"""The numbers that cards report, in words and with remedies: statuses of completions, asynchronous events, errnos of calls."""

from __future__ import annotations

import errno

__all__ = ["ERRNO_REMEDIES", "EVENTS", "FLUSHED", "PORT_ERROR", "STATUSES", "SUCCESS", "errno_name"]

SUCCESS = 0  # IBV_WC_SUCCESS
FLUSHED = 5  # IBV_WC_WR_FLUSH_ERR: the queue pair had failed before; the first other status says why

# ibv_wc_status: number -> (name, what it means here, remedy)
STATUSES: dict[int, tuple[str, str, str]] = {
    0: ("IBV_WC_SUCCESS", "completed", ""),
    1: ("IBV_WC_LOC_LEN_ERR", "the message is longer than the port or the receive buffer takes", "a bug: report it"),
    2: ("IBV_WC_LOC_QP_OP_ERR", "the card could not process the request", "check the card's firmware and driver logs (dmesg)"),
    3: ("IBV_WC_LOC_EEC_OP_ERR", "the card could not process the request", "check the card's firmware and driver logs (dmesg)"),
    4: ("IBV_WC_LOC_PROT_ERR", "the local memory is not registered for this", "a bug, or memory that was freed under the transport"),
    5: ("IBV_WC_WR_FLUSH_ERR", "the queue pair was already in error", "look for the first error of this queue pair, on either side"),
    6: ("IBV_WC_MW_BIND_ERR", "a memory window could not be bound", "a bug: none are used"),
    7: ("IBV_WC_BAD_RESP_ERR", "the peer's card sent an unexpected answer", "check that both cards run the same kind of firmware"),
    8: ("IBV_WC_LOC_ACCESS_ERR", "the local memory is not registered for this", "a bug, or memory that was freed under the transport"),
    9: ("IBV_WC_REM_INV_REQ_ERR", "the peer's card refused the request as invalid", "do all ranks run the same version of mkernel?"),
    10: ("IBV_WC_REM_ACCESS_ERR", "the peer's memory is not registered for this (key or range)", "has the peer closed its world?"),
    11: ("IBV_WC_REM_OP_ERR", "the peer's card could not process the request", "check the peer's driver logs (dmesg)"),
    12: ("IBV_WC_RETRY_EXC_ERR", "the peer's card does not answer", "is the peer alive, its link up, the fabric lossless (PFC, ECN)?"),
    13: ("IBV_WC_RNR_RETRY_EXC_ERR", "the peer posted no receive in time", "is the peer's engine process starved of CPU time?"),
    14: ("IBV_WC_LOC_RDD_VIOL_ERR", "wrong reliable datagram domain", "a bug: none are used"),
    15: ("IBV_WC_REM_INV_RD_REQ_ERR", "the peer's card refused a read or an atomic", "set MKERNEL_RC_SIGNAL=imm if the card lacks atomics"),
    16: ("IBV_WC_REM_ABORT_ERR", "the peer's card aborted the operation", "check the peer's driver logs (dmesg)"),
    17: ("IBV_WC_INV_EECN_ERR", "invalid end-to-end context", "a bug: none are used"),
    18: ("IBV_WC_INV_EEC_STATE_ERR", "invalid end-to-end context", "a bug: none are used"),
    19: ("IBV_WC_FATAL_ERR", "the card failed", "check the card's driver logs (dmesg)"),
    20: ("IBV_WC_RESP_TIMEOUT_ERR", "the peer's card does not answer", "is the peer alive, its link up?"),
    21: ("IBV_WC_GENERAL_ERR", "the card reports an error of its own", "check the card's driver logs (dmesg); the vendor error says more"),
    22: ("IBV_WC_TM_ERR", "tag matching failed", "a bug: none is used"),
    23: ("IBV_WC_TM_RNDV_INCOMPLETE", "tag matching failed", "a bug: none is used"),
}

PORT_ERROR = 10  # IBV_EVENT_PORT_ERR: a port of the device is down, perhaps another one, perhaps for a moment

# ibv_event_type: number -> (name, fatal, what it means, remedy)
EVENTS: dict[int, tuple[str, bool, str, str]] = {
    0: ("IBV_EVENT_CQ_ERR", True, "a completion queue overran", "a bug: report it"),
    1: ("IBV_EVENT_QP_FATAL", True, "a queue pair failed", "check the card's driver logs (dmesg)"),
    2: ("IBV_EVENT_QP_REQ_ERR", True, "a peer sent an invalid request", "do all ranks run the same version of mkernel?"),
    3: ("IBV_EVENT_QP_ACCESS_ERR", True, "a peer asked for memory it may not touch", "do all ranks run the same version of mkernel?"),
    4: ("IBV_EVENT_COMM_EST", False, "a queue pair heard from its peer", ""),
    5: ("IBV_EVENT_SQ_DRAINED", False, "a send queue is empty", ""),
    6: ("IBV_EVENT_PATH_MIG", False, "a path has migrated", ""),
    7: ("IBV_EVENT_PATH_MIG_ERR", True, "a path could not migrate", "check the fabric"),
    8: ("IBV_EVENT_DEVICE_FATAL", True, "the card failed or was removed", "check the card's driver logs (dmesg)"),
    9: ("IBV_EVENT_PORT_ACTIVE", False, "the port is up", ""),
    10: ("IBV_EVENT_PORT_ERR", True, "the port is down", "check cable, switch port and `ibv_devinfo`"),
    11: ("IBV_EVENT_LID_CHANGE", True, "the port's address has changed", "start again: the subnet manager has renumbered the fabric"),
    12: ("IBV_EVENT_PKEY_CHANGE", False, "the port's partition table has changed", ""),
    13: ("IBV_EVENT_SM_CHANGE", False, "another subnet manager has taken over", ""),
    14: ("IBV_EVENT_SRQ_ERR", True, "a shared receive queue failed", "a bug: none is used"),
    15: ("IBV_EVENT_SRQ_LIMIT_REACHED", False, "a shared receive queue runs low", ""),
    16: ("IBV_EVENT_QP_LAST_WQE_REACHED", False, "a failed queue pair has no more receives", ""),
    17: ("IBV_EVENT_CLIENT_REREGISTER", False, "the subnet manager asks clients to register again", ""),
    18: ("IBV_EVENT_GID_CHANGE", False, "the port's GID table has changed", ""),
    19: ("IBV_EVENT_WQ_FATAL", True, "a work queue failed", "check the card's driver logs (dmesg)"),
}

# Remedies for calls that fail while connections are set up.
ERRNO_REMEDIES: dict[int, str] = {
    errno.EPERM: "allow locked memory: `ulimit -l unlimited`, LimitMEMLOCK=infinity for services",
    errno.EACCES: "give the user access to /dev/infiniband",
    errno.ENOENT: "load the card's kernel modules and ib_uverbs",
    errno.ENODEV: "the device has gone: see `python -m mkernel doctor`",
    errno.ENOMEM: "allow locked memory (`ulimit -l unlimited`), or pass a smaller heap_bytes",
    errno.EINVAL: "is the GID still there, and the peer's network reachable? see `python -m mkernel doctor`",
    errno.EOPNOTSUPP: "the card or its driver cannot do this: see docs/transports.md",
    errno.ETIMEDOUT: "the peer's address cannot be resolved: check routes and `ip neigh`",
    errno.EHOSTUNREACH: "no route to the peer: check routes, or choose another GID with MKERNEL_GID_INDEX",
    errno.ENETUNREACH: "no route to the peer: check routes, or choose another GID with MKERNEL_GID_INDEX",
    errno.ENOSPC: "the card is out of resources: fewer MKERNEL_RC_QUEUE_PAIRS",
}

_ERRNOS = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP"}  # this number has two names, and verbs mean this one


def errno_name(code: int) -> str:
    """The name of an errno, e.g. ``ENOMEM``; ``no errno`` for 0."""
    return _ERRNOS.get(code, f"errno {code}") if code else "no errno"
