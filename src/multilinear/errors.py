"""The one error that users are meant to read, and the checks that raise it."""

from collections.abc import Iterable


class MultilinearError(ValueError):
    """Bad input, told in one line: what is wrong, what is allowed, what to do."""


def check_choice(kind: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`, else raise an error that lists them.

    >>> check_choice("norm", "batch", ["layer", "batch"])
    'batch'
    """
    names = sorted(known)
    if value not in names:
        raise MultilinearError(f"unknown {kind} {value!r}; known: {', '.join(names)}")
    return value
