"""A server in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from ._arguments import PathLike, flags
from .errors import EnvironmentError_, InputError

if TYPE_CHECKING:
    # What a server needs is imported where it is used: the package is to import in milliseconds.
    import subprocess
    from types import TracebackType

__all__ = ["Server", "program"]

_PATIENCE = 10.0
"""Seconds for a server to end."""


def program() -> list[str]:
    """Return the words that start the program ``mantissa`` in a process of its own."""
    return [sys.executable, "-I", "-S", os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")]


class Server:
    """Server of a model with the protocols of OpenAI, Anthropic, llama.cpp and Ollama: ``with Server(model) as server``.

    ``options`` are flags of ``mantissa serve``, such as ``context=4096`` or ``kv="int8-head"``. The process ends with the block.

    >>> import json, mantissa, urllib.request
    >>> with mantissa.Server("demo") as server:
    ...     with urllib.request.urlopen(server.url + "/v1/models") as reply:
    ...         print(json.load(reply)["data"][0]["id"])
    demo
    """

    def __init__(self, model: PathLike, *, host: str = "127.0.0.1", port: int = 0, timeout: float = 600.0, **options: Any) -> None:
        self._model = os.fspath(model)
        self._host = host
        self._port = port
        self._timeout = timeout
        self._options: Mapping[str, Any] = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Address, such as ``http://127.0.0.1:8080``; clients of OpenAI take ``url + "/v1"``."""
        return f"http://{self._host}:{self._port}"

    def start(self) -> Server:
        """Start the process and wait until it answers."""
        import socket
        import subprocess
        import tempfile
        import time

        if self._process is not None:
            return self
        if self._port == 0:
            with socket.socket() as free:
                free.bind((self._host, 0))
                self._port = free.getsockname()[1]
        words = [*program(), "serve", f"--host={self._host}", f"--port={self._port}", *flags(self._options), "--", self._model]
        # A pipe that nobody reads would stop the server once it is full.
        log = self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + self._timeout
        while not self._answers():
            if self._process.poll() is not None:
                log.seek(0)
                message = log.read().decode(errors="replace").strip().splitlines()
                code, self._process = self._process.returncode, None
                text = message[-1].removeprefix("error: ") if message else f"the server ended with code {code}"
                raise InputError(text) if code == 2 else EnvironmentError_(text)
            if time.monotonic() > deadline:
                self.stop()
                raise EnvironmentError_(f"server: expected an answer within {self._timeout} s, got none")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        import json
        import urllib.request

        try:
            with urllib.request.urlopen(self.url + "/health", timeout=1) as reply:
                return bool(json.load(reply).get("status") == "ok")
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        """End the process, after the answers that it is writing."""
        import signal
        import subprocess

        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
