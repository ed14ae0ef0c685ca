"""What a check of calls finds, as text: what is wrong with their results, or the error in which they ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec

from mkernel.errors import CompileError, Error

__all__ = ["errors_are_findings", "wrong_of"]

_P = ParamSpec("_P")
_MOST = 6  # of what ranks say is wrong


def wrong_of(found: Iterable[Iterable[str]]) -> str | None:
    """The finding that is made of what each rank says is wrong, if any does."""
    wrong = [text for of_rank in found for text in of_rank]
    return "wrong: " + "\n".join(wrong[:_MOST]) if wrong else None


def errors_are_findings(check: Callable[_P, str | None]) -> Callable[_P, str | None]:
    """The check that returns as its finding an error in which calls end. A kernel that cannot be compiled is still an error."""

    @functools.wraps(check)
    def found(*args: _P.args, **kwargs: _P.kwargs) -> str | None:
        try:
            return check(*args, **kwargs)
        except CompileError:
            raise
        except Error as error:
            return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ()))

    return found
