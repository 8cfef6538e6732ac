"""Settings of runs as values, and values as files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mantissa
from mantissa import _arguments

TEXT = "Once upon a time there was a little girl. She had a red ball and a small dog. " * 100


def test_a_mapping_is_the_settings_file_of_the_same_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib = pytest.importorskip("tomllib")
    settings = {
        "seed": 3, "out": "run", "empty": None, "model": {"architecture": {"model_type": "llama", "rope_theta": 1e4}},
        "data": {"files": [Path("a b.txt"), "ü \"quoted\" \U0001f600.txt"], "chat": False}, "optimizer": {"lr": 1e-8},
    }
    monkeypatch.chdir(tmp_path)
    read = tomllib.loads(Path(_arguments.settings_file(settings)).read_text(encoding="utf-8"))
    assert read["out"] == str(tmp_path / "run") and "empty" not in read
    assert read["data"]["files"] == [str(tmp_path / "a b.txt"), str(tmp_path / "ü \"quoted\" \U0001f600.txt")]
    assert read["model"] == settings["model"] and read["optimizer"] == settings["optimizer"]
    assert _arguments.settings_file(settings) == _arguments.settings_file(dict(settings))


def test_a_run_of_a_mapping_is_that_of_its_file(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    (tmp_path / "t.txt").write_text(TEXT)
    changes = {"schedule.steps": 3, "data.length": 32, "model.architecture.num_hidden_layers": 1}
    steps: list[int] = []
    one = mantissa.train(
        "small", data=[tmp_path / "t.txt"], set={**changes, "out": str(tmp_path / "one")},
        on_step=lambda row: steps.append(row["step"]),
    )
    assert steps == [1, 2, 3]
    settings = tomllib.loads((tmp_path / "one" / "config.toml").read_text())
    settings["out"] = tmp_path / "two"
    two = mantissa.train(settings)
    assert two.history["loss"] == one.history["loss"] and len(one.history["step"]) == 3
    assert (tmp_path / "one/model/model.safetensors").read_bytes() == (tmp_path / "two/model/model.safetensors").read_bytes()
    with pytest.raises(mantissa.InputError, match="optimiser"):
        mantissa.train({**settings, "optimiser": {}})


def test_kept_files_end_with_the_process(tmp_path: Path) -> None:
    script = (
        "import os, mantissa; from mantissa import _arguments as a; f = a.kept_file('text', '.txt'); print(f);"
        "pid = os.fork();\nif pid == 0: raise SystemExit\nos.waitpid(pid, 0); assert os.path.exists(f)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    path = Path(done.stdout.strip())
    assert path.parent.parent == tmp_path and not path.exists()


def test_flags() -> None:
    options = {"a_b": 1, "for": "vllm", "as_": ["x", "y"], "none": None, "no": False, "yes": True, "path": Path("-p")}
    assert list(_arguments.flags(options)) == ["--a-b=1", "--for=vllm", "--as=x", "--as=y", "--yes", "--path=-p"]


def test_the_command_comes_with_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mantissa", "inspect", "demo", "--json"], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["parameters"] == 1328512
    wrong = subprocess.run([sys.executable, "-m", "mantissa", "inspect", "nowhere"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ")
