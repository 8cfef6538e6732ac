"""Progress of a job: a function of the caller, a tqdm bar, or nothing; notes go to the log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Progress", "shown"]

Progress = Callable[[str, str, int, int], object]
"""Function of ``kind``, ``text``, ``done`` and ``total`` (0 if unknown). An exception in it stops the job."""


class _Bar:
    """A tqdm bar for each stretch of work."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def __call__(self, kind: str, text: str, done: int, total: int) -> None:
        if kind == "start":
            self._close()
            self._bar = self._tqdm(total=total or None, unit=text or "B", unit_scale=True, leave=False)
        elif kind == "finish":
            self._close()
        elif self._bar is not None:
            if kind in ("message", "status"):
                self._bar.set_postfix_str(text[-40:], refresh=False)
            self._bar.update(max(0, done - self._bar.n))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _tqdm() -> Any:
    """Return tqdm where a person watches and it is installed."""
    if not (sys.stderr is not None and sys.stderr.isatty()) and "IPython" not in sys.modules:
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


def shown(progress: Progress | bool | None) -> Progress:
    """Return the function that a job calls: warnings and notes go to the logger ``mantissa`` as well."""
    import logging

    log = logging.getLogger("mantissa")
    if progress is None or progress is True:
        tqdm = _tqdm()
        inner: Progress | None = None if tqdm is None else _Bar(tqdm)
    elif progress is False:
        inner = None
    else:
        inner = progress

    def call(kind: str, text: str, done: int, total: int) -> object:
        if kind == "warning":
            log.warning(text)
        elif kind == "note":
            log.info(text)
        return None if inner is None else inner(kind, text, done, total)

    return call
