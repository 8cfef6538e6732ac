"""Training runs: their figures, and what is read of their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ._report import Report

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["History", "Run", "StepReader"]


class History(Mapping[str, "list[Any]"]):
    """Columns of a run's log: a list for each figure, with ``None`` where a step has none. ``history["loss"]``."""

    def __init__(self, log: Path) -> None:
        rows: dict[int, dict[str, Any]] = {}
        for row, _ in _rows(log):
            # A resumed run repeats the steps after its checkpoint.
            rows[row["step"]] = row
        steps = [rows[step] for step in sorted(rows)]
        names = dict.fromkeys(name for row in steps for name, value in row.items() if isinstance(value, (int, float)))
        self._columns = {name: [row.get(name) for row in steps] for name in names}

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def plot(self, *names: str) -> Any:
        """Draw figures (the loss if none is named) over the steps, where matplotlib is installed; return the axes."""
        from matplotlib import pyplot

        axes = pyplot.gca()
        for name in names or ("loss",):
            axes.plot(self["step"], self[name], label=name)
        axes.set_xlabel("step")
        axes.legend()
        return axes


class Run(Report):
    """Report of a training run, and its log."""

    __slots__ = ()

    @property
    def history(self) -> History:
        """Columns of the run's log."""
        from pathlib import Path

        return History(Path(self["run"], "log.jsonl"))


def _rows(log: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the whole lines of a log from a byte on, each with the byte at which it ends."""
    import json

    try:
        file = log.open("rb")
    except FileNotFoundError:
        return
    with file:
        # A log that is shorter than what was read is that of a run that was started over.
        at = file.seek(0 if start > file.seek(0, 2) else start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            at += len(line)
            yield json.loads(line), at


class StepReader:
    """Progress of a run that calls a function with the log's row of each step, once."""

    def __init__(self, run: Path, on_step: Callable[[dict[str, Any]], object], inner: Callable[..., object]) -> None:
        self._log = run / "log.jsonl"
        self._on_step = on_step
        self._inner = inner
        self._read = self._log.stat().st_size if self._log.exists() else 0

    def __call__(self, kind: str, text: str, done: int, total: int) -> object:
        answer = self._inner(kind, text, done, total)
        self.read()
        return answer

    def read(self) -> None:
        """Call the function for the rows since the last call."""
        for row, end in _rows(self._log, self._read):
            self._read = end
            self._on_step(row)
