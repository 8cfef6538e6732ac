"""Jobs give the bytes and the figures of the command, and errors say what they say."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import mantissa

TEXT = "Once upon a time there was a little girl. She had a red ball and a small dog. " * 40
RECIPES = [
    "rtn-int4-g32", "rtn-int8-channel", "rtn-nf4", "rtn-nvfp4", "rtn-mxfp4", "fp8-dynamic", "rtn-int3-g32-asym",
    "hqq-int4-g32", "gptq-int4-g32", "awq-int4-g32-asym",
]
CALIBRATED = ("gptq", "awq")


def run(command: str, *arguments: str) -> str:
    done = subprocess.run([command, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_are_those_of_the_command(command: str, recipe: str, tmp_path: Path) -> None:
    text = tmp_path / "c.txt"
    text.write_text(TEXT)
    calibrated = recipe.startswith(CALIBRATED)
    more = ["--calibration", str(text), "--length", "64"] if calibrated else []
    run(command, "quantize", "demo", "--recipe", recipe, "--out", str(tmp_path / "cli"), "--quiet", *more)
    mantissa.quantize(
        "demo", recipe, out=tmp_path / "py", calibration=text if calibrated else None,
        length=64 if calibrated else None,
    )
    assert files(tmp_path / "py") == files(tmp_path / "cli")


def test_an_evaluation_is_that_of_the_command(command: str, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    printed = run(command, "eval", "demo", "--reference", "demo", "--text", str(text), "--context", "64", "--json")
    ours = json.loads(mantissa.evaluate("demo", reference="demo", text=text, context=64).json())
    theirs = json.loads(printed)
    for report in (ours, theirs):
        for varying in [name for name in report if "second" in name or "memory" in name]:
            del report[varying]
    assert ours == theirs


def test_calibration_takes_texts_rows_and_tokens(tmp_path: Path) -> None:
    made = {}
    for name, samples in {
        "file": tmp_path / "c.txt",
        "texts": [TEXT],
        "rows": [{"text": TEXT, "label": 1}],
    }.items():
        if name == "file":
            (tmp_path / "c.txt").write_text(TEXT)
        out = tmp_path / name
        mantissa.quantize("demo", "gptq-int4-g32", out=out, calibration=samples, length=64)
        made[name] = (out / "model.safetensors").read_bytes()
    assert made["texts"] == made["rows"]
    tokens = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]]
    report = mantissa.quantize("demo", "gptq-int4-g32", out=tmp_path / "tokens", calibration=tokens)
    assert report.calibration["tokens"] == 16
    with pytest.raises(mantissa.InputError, match="row 1"):
        mantissa.quantize("demo", "gptq-int4-g32", out=tmp_path / "x", calibration=["text", 5])


def test_errors_carry_their_parts(tmp_path: Path) -> None:
    with pytest.raises(mantissa.InputError) as missing:
        mantissa.inspect(tmp_path / "nowhere")
    assert isinstance(missing.value, (mantissa.MantissaError, ValueError))
    assert missing.value.got == "no such file or folder" and missing.value.expected
    with pytest.raises(mantissa.InputError, match="int5"):
        mantissa.quantize("demo", "int5", out=tmp_path / "q")
    with pytest.raises(mantissa.GateError):
        mantissa.quantize("demo", "rtn-int2-g32", out=tmp_path / "q", max_kl=1e-6)
    assert not (tmp_path / "q").exists()
    with pytest.raises(mantissa.GateError) as gate:
        mantissa.evaluate("demo", reference="demo", text="default", context=64, limit=128, max_ppl_increase=-0.5)
    assert gate.value.report is not None and gate.value.report.kl == 0.0
    assert missing.value.report is None
    with pytest.raises(mantissa.EnvironmentError_) as small:
        mantissa.quantize("demo", "rtn-int4-g32", out=tmp_path / "q", memory="1M")
    assert isinstance(small.value, OSError) and small.value.fix
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "thesis.tex").write_text("years")
    with pytest.raises(mantissa.MantissaError):
        mantissa.quantize("demo", "rtn-int4-g32", out=tmp_path / "q")
    assert (tmp_path / "q" / "thesis.tex").read_text() == "years"


def test_progress_is_a_function_and_notes_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[str, str, int, int]] = []
    with caplog.at_level(logging.INFO, logger="mantissa"):
        mantissa.quantize(
            "demo", "rtn-int4-g32", out=tmp_path / "q", progress=lambda *call: calls.append(call)
        )
    kinds = [kind for kind, *_ in calls]
    assert "start" in kinds and "finish" in kinds
    assert all(done <= total or total == 0 for kind, _, done, total in calls if kind == "progress")


def test_ctrl_c_ends_a_call_and_the_same_call_resumes(tmp_path: Path) -> None:
    text = tmp_path / "c.txt"
    text.write_text(TEXT * 10)
    expected, out = tmp_path / "whole", tmp_path / "out"
    arguments = {"calibration": text, "length": 64, "samples": 64}
    mantissa.quantize("demo", "gptq-int4-g32", out=expected, **arguments)
    sent = []

    def interrupt() -> None:
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(3):
        sender = threading.Thread(target=interrupt)
        sender.start()
        try:
            mantissa.quantize("demo", "gptq-int4-g32", out=out, overwrite=True, **arguments)
        except KeyboardInterrupt:
            assert time.monotonic() - sent[-1] < 0.5
        finally:
            # The call may have ended before the signal.
            try:
                sender.join()
                time.sleep(0.05)
            except KeyboardInterrupt:
                pass
    mantissa.quantize("demo", "gptq-int4-g32", out=out, overwrite=True, **arguments)
    assert files(out) == files(expected)
    assert not [name for name in os.listdir(tmp_path) if ".mantissa-" in name]


def test_import_is_light() -> None:
    script = "import sys, mantissa; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_reports_do_not_change() -> None:
    report = mantissa.inspect("demo")
    with pytest.raises(AttributeError):
        report.parameters = 1
    with pytest.raises(AttributeError, match="has no field"):
        report.nothing
    assert json.loads(report.json())["parameters"] == report["parameters"] == report.parameters
    assert "<table>" in report._repr_html_()


def test_memory_is_flat_over_many_calls() -> None:
    resource = pytest.importorskip("resource")
    for _ in range(50):
        mantissa.inspect("demo")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        mantissa.inspect("demo")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
