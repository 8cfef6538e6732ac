"""Exceptions of the package. Each message names what is at fault, what was expected, what was found, and a fix that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._report import Report

__all__ = ["MantissaError", "InputError", "EnvironmentError_", "GateError", "Interrupted", "InternalError"]

_PARTS = r"(?s)^(?P<what>.*?): expected (?P<expected>.*?), got (?P<got>.*?)(?:; fix: (?P<fix>.*))?$"


class MantissaError(Exception):
    """Any error of mantissa.

    ``file`` and ``field`` name the place, ``expected`` and ``got`` what was wrong, ``fix`` what helps; each is ``None`` if the
    message does not state it.
    """

    def __init__(self, message: str = "", report: str = "") -> None:
        super().__init__(message)
        self._report = report
        # Imported here: the package is to import in milliseconds.
        import re

        found = re.match(_PARTS, message)
        what = found["what"] if found else None
        place, _, field = what.rpartition(": ") if what else ("", "", "")
        self.file: str | None = place or None
        self.field: str | None = field or None
        self.expected: str | None = found["expected"] if found else None
        self.got: str | None = found["got"] if found else None
        fix = found["fix"] if found else None
        if fix is None and "; fix: " in message:
            fix = message.rsplit("; fix: ", 1)[1]
        self.fix: str | None = fix

    @property
    def report(self) -> Report | None:
        """Report of a command that ran before it failed, as at a quality gate."""
        import json

        from ._report import Report

        return Report(json.loads(self._report)) if self._report else None


class InputError(MantissaError, ValueError):
    """An argument or a file cannot be used: the same call fails again."""


class EnvironmentError_(MantissaError, OSError):
    """Memory, disk, or the system failed."""

    def __init__(self, message: str = "", report: str = "") -> None:
        MantissaError.__init__(self, message, report)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class GateError(MantissaError):
    """The work ran, and its result exceeds a bound."""


class Interrupted(MantissaError):
    """The work was asked to stop; what it has is kept, and the same call resumes."""


class InternalError(MantissaError):
    """A bug of mantissa."""
