"""Arguments of commands: paths, flags, and samples that are values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

from . import _core
from ._progress import Progress, shown
from ._report import Report
from .errors import EnvironmentError_, InputError

__all__ = ["PathLike", "Samples", "called", "files_of", "flags", "kept_file", "memory_text", "path_text", "settings_file"]

PathLike = Union[str, "os.PathLike[str]"]
"""Path of a file or folder."""

Samples = Union[PathLike, Iterable[Any]]
"""A file, ``"default"``, texts, dicts with ``"text"``, or lists of token ids."""


def path_text(path: PathLike | None) -> str | None:
    """Return a path as text."""
    return None if path is None else os.fspath(path)


def memory_text(memory: str | int | None) -> str | None:
    """Return an amount of memory as text: a number counts bytes."""
    return None if memory is None else str(memory)


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags of a command: ``None`` and ``False`` give none, ``True`` the bare flag, a sequence one for each element."""
    for name, value in options.items():
        flag = "--" + name.strip("_").replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            yield flag
            continue
        many: Iterable[Any] = [value]
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, os.PathLike)):
            many = value
        for one in many:
            yield f"{flag}={os.fspath(one) if isinstance(one, os.PathLike) else one}"


def called(
    command: str,
    positional: Sequence[PathLike],
    options: Mapping[str, Any],
    progress: Progress | bool | None = None,
) -> Report:
    """Run a command of the program in this process, and return its report."""
    import json

    arguments = ["mantissa", command, *flags(options)]
    if positional:
        arguments += ["--", *(os.fspath(path) for path in positional)]
    return Report(json.loads(_core.command(arguments, shown(progress))))


def kept_file(text: str, suffix: str) -> str:
    """Return a file that holds a text, named by its content: the same text is the same input of a call that is repeated.

    It is in a folder of this user's for temporary files, and removed when the process ends.
    """
    # Imported where they are used: the package is to import in milliseconds.
    import atexit
    import hashlib
    import tempfile
    import threading
    from pathlib import Path

    folder = Path(tempfile.gettempdir(), f"mantissa-inputs-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise EnvironmentError_(f"{folder}: expected a folder of this user, got another's; fix: set TMPDIR")
    path = folder / (hashlib.sha256(text.encode()).hexdigest()[:32] + suffix)
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    if str(path) not in _kept:
        _kept.add(str(path))
        atexit.register(_remove, str(path), os.getpid())
    return str(path)


_kept: set[str] = set()


def _remove(path: str, owner: int) -> None:
    """Remove a file at the end of the process that wrote it, not of one that it forked."""
    if os.getpid() == owner and os.path.exists(path):
        os.remove(path)


def files_of(name: str, samples: Samples | None) -> tuple[list[str], list[str]]:
    """Return the text files and the token files that a command reads, for files, texts, token ids or rows of a dataset.

    ``name`` is the argument's, for errors.
    """
    import json

    if samples is None:
        return [], []
    if isinstance(samples, (str, os.PathLike)):
        path = os.fspath(samples)
        file = path.rsplit(":", 1)[0]
        if path == "default" or os.path.exists(path) or os.path.exists(file):
            return ([], [path]) if file.endswith(".json") else ([path], [])
        raise InputError(f'{name}: expected a file, "default", texts or token ids, got {path!r}; fix: {name}=[text]')
    rows = list(samples)
    if not rows:
        raise InputError(f"{name}: expected at least one text, got none")
    if all(isinstance(row, os.PathLike) for row in rows):
        return [os.fspath(row) for row in rows], []
    if all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        windows = [[int(token) for token in row] for row in rows]
        return [], [kept_file(json.dumps(windows), ".json")]
    lines = []
    for at, row in enumerate(rows):
        text = row.get("text") if hasattr(row, "get") else row
        if not isinstance(text, str):
            raise InputError(f'{name}: row {at}: expected a text, or a dict with "text", got {row!r:.80}')
        lines.append(json.dumps({"text": text}) + "\n")
    return [kept_file("".join(lines), ".jsonl")], []


_PATHS = {"": ["out"], "model": ["config", "tokenizer", "init"], "data": ["files"], "validation": ["files", "share"]}
"""Settings of a training run that are paths, by section."""


def settings_file(settings: PathLike | Mapping[str, Any]) -> str:
    """Return the file of a run's settings; a mapping becomes one, its paths relative to the working folder."""
    if not isinstance(settings, Mapping):
        return os.fspath(settings)
    whole: dict[str, Any] = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for section, names in _PATHS.items():
        table = whole if not section else whole.get(section, {})
        for name in names:
            value = table.get(name)
            if isinstance(value, (str, os.PathLike)):
                table[name] = os.path.abspath(value)
            elif isinstance(value, Iterable) and not isinstance(value, Mapping):
                table[name] = [os.path.abspath(one) for one in value]
    return kept_file("".join(_toml(whole, "")), ".toml")


def _toml(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the lines of a table: plain values come before the tables inside."""
    import json

    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    for name, value in table.items():
        if name not in inner and value is not None:
            # JSON writes these values as TOML does, but for None and floats that are no numbers.
            yield f"{json.dumps(str(name))} = {json.dumps(value, default=os.fspath, allow_nan=False, ensure_ascii=False)}\n"
    for name, value in inner.items():
        path = f"{prefix}{json.dumps(str(name))}"
        yield f"\n[{path}]\n"
        yield from _toml(value, path + ".")
