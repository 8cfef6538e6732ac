"""Where the command is, which the package must agree with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def command() -> str:
    """Path of the command; `MANTISSA_BIN` names another one."""
    found = os.environ.get("MANTISSA_BIN") or shutil.which("mantissa")
    for profile in ("ci", "release", "debug"):
        built = ROOT / "target" / profile / "mantissa"
        if found is None and built.exists():
            found = str(built)
    if found is None:
        pytest.skip("no command mantissa: build it, or name it by MANTISSA_BIN")
    assert subprocess.run([found, "--version"], check=True, capture_output=True)
    return found
