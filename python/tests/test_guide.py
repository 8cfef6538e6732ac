"""The Python of the guide runs, block after block, as a reader would type it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"
BLOCK = re.compile(r"(?P<skip><!-- docs-test: skip [^\n]*-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [found["code"] for found in BLOCK.finditer(GUIDE.read_text(encoding="utf-8")) if not found["skip"]]
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, str(GUIDE), "exec"), names)
    assert "True" in printed.getvalue() and "±" in printed.getvalue()
    first = [line for line in blocks[0].splitlines() if line and not line.startswith("print")]
    # The first artifact takes two lines, its measure a third.
    assert len(first) == 3
