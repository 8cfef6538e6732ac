"""A bug inside a call is an exception, never the end of the process, and leaves nothing half done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ALL = os.environ.get("MANTISSA_TESTS") == "all"

CHILD = """
import pathlib, shutil, sys, mantissa

out = pathlib.Path(sys.argv[1])
try:
    mantissa.quantize("demo", "rtn-int4-g128", out=out, verify=False)
    print("whole")
except mantissa.InternalError as error:
    assert "injected fault" in str(error), error
    if out.exists():
        # It was put in place before.
        shutil.copytree(out, out.with_name(out.name + "-published"))
    print("panicked")
    mantissa.quantize("demo", "rtn-int4-g128", out=out, verify=False)
"""


def quantized(out: Path, **environment: str) -> str:
    """What a process says that quantizes into a folder, and again if a bug ended the first call."""
    made = subprocess.run(
        [sys.executable, "-c", CHILD, str(out)], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert made.returncode == 0, (environment, made.stderr)
    return made.stdout.strip()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_panic_at_any_change_of_a_file_is_an_exception(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert quantized(tmp_path / "whole", MANTISSA_TRACE=str(trace)) == "whole"
    changes = len(trace.read_text().splitlines())
    wanted = 100 if ALL else 8
    step = max(1, changes // wanted)
    ended = []
    for at in range(0, changes, step):
        out = tmp_path / f"at-{at}"
        ended.append(quantized(out, MANTISSA_FAULT=f"panic:{at}"))
        for made in tmp_path.glob(f"at-{at}*"):
            assert content(made) == content(tmp_path / "whole"), made
    # The last changes are those at the interpreter's end, after the call.
    assert len(ended) >= wanted and ended.count("panicked") >= len(ended) - 4, ended
