"""Reports: read-only values of what a job measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Report"]


class Report(Mapping[str, Any]):
    """Figures of a job, under the names of the command's JSON report.

    Fields are attributes and items: ``report.bits_per_weight``, ``report["evaluation"]["kl"]``. A report never changes.
    """

    __slots__ = ("_fields",)
    _fields: dict[str, Any]

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            known = ", ".join(self._fields)
            raise AttributeError(f"the report has no field {name!r}; it has {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a report cannot be changed")

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}={value}' for name, value in self._short())})"

    def json(self, indent: int | None = None) -> str:
        """Return the report as JSON.

        >>> import mantissa
        >>> '"parameters"' in mantissa.inspect("demo").json()
        True
        """
        import json

        return json.dumps(self._fields, indent=indent)

    def markdown(self) -> str:
        """Return the single figures as a Markdown table, for a model card.

        >>> import mantissa
        >>> mantissa.inspect("demo").markdown().startswith("| field | value |")
        True
        """
        rows = [f"| {name} | {value} |" for name, value in self._short()]
        return "\n".join(["| field | value |", "|---|---|", *rows])

    def _repr_html_(self) -> str:
        from html import escape

        rows = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in self._short())
        return f"<table>{''.join(rows)}</table>"

    def _short(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that are one figure or word, and those of the measured quality."""
        for name, value in self._fields.items():
            if isinstance(value, (str, int, float, bool)):
                yield name, value
        evaluation = self._fields.get("evaluation")
        if isinstance(evaluation, dict):
            for name in ("kl", "kl_se", "top1", "ppl"):
                if name in evaluation:
                    yield f"evaluation.{name}", evaluation[name]
