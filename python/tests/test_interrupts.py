"""Ctrl-C ends every long call at once, an exception in a function of the caller's ends it too, and forked processes work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mantissa

TEXT = "Once upon a time there was a little girl. She had a red ball and a small dog. " * 400


SOON = 0.5
"""Most seconds to KeyboardInterrupt on a busy machine; docs/results/python.md has what was measured."""


def interrupted(call: Callable[[], object], begun: threading.Event | None = None) -> float | None:
    """Seconds from a signal, sent once `begun` is set or in a moment, to KeyboardInterrupt; None if there was none."""
    sent = []

    def interrupt() -> None:
        if begun is None:
            time.sleep(0.1)
        else:
            assert begun.wait(60)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    took = None
    try:
        call()
    except KeyboardInterrupt:
        took = time.monotonic() - sent[-1]
    try:
        sender.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        pass
    return took


def test_an_evaluation_ends(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT * 16)
    begun = threading.Event()

    def told(kind: str, _text: str, done: int, _total: int) -> None:
        if kind == "progress" and done > 0:
            begun.set()

    call = lambda: mantissa.evaluate("demo", text=tmp_path / "t.txt", context=64, threads=1, progress=told)  # noqa: E731
    took = interrupted(call, begun)
    assert took is not None and took < SOON


def test_a_continuation_ends() -> None:
    model = mantissa.load("demo", threads=1)
    prompts = ["Once upon a time"] * 64
    took = interrupted(lambda: model.generate(prompts, max_new_tokens=500, ignore_eos=True))
    assert took is not None and took < SOON
    # The model is whole.
    assert len(model.generate("Once", max_new_tokens=3, ignore_eos=True)[0].tokens) == 3


def test_a_run_ends_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)

    def tuned(out: str, **more: object) -> mantissa.Run:
        return mantissa.finetune(
            "demo", tmp_path / "t.txt", out=tmp_path / out, steps=40, length=64, adapter="lora", **more  # type: ignore[arg-type]
        )

    whole = tuned("whole")
    begun = threading.Event()
    took = interrupted(lambda: tuned("cut", on_step=lambda row: row["step"] == 5 and begun.set()), begun)
    assert took is not None and took < SOON
    steps = []
    resumed = tuned("cut", resume=True, on_step=lambda row: steps.append(row["step"]))
    assert steps and steps == sorted(set(steps)) and steps[-1] == 40
    assert resumed.history["loss"] == whole.history["loss"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        [one] = (tmp_path / "whole").rglob(name)
        [other] = (tmp_path / "cut").rglob(name)
        assert one.read_bytes() == other.read_bytes()


def test_an_exception_of_the_callers_function_comes_out(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(row: dict[str, object]) -> None:
        if row["step"] == 3:
            raise Enough

    (tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises(Enough):
        mantissa.finetune("demo", tmp_path / "t.txt", out=tmp_path / "run", steps=400, length=32, on_step=stop)
    assert mantissa.finetune("demo", tmp_path / "t.txt", out=tmp_path / "run", steps=400, length=32, restart=True, dry_run=True)


def test_a_forked_process_runs_models_and_jobs() -> None:
    model = mantissa.load("demo", threads=2)
    expected = model.generate("Once upon a time", max_new_tokens=4)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            same = model.generate("Once upon a time", max_new_tokens=4) == expected
            same = same and mantissa.inspect("demo").parameters == 1328512
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    # The parent's model was not removed by a child.
    assert mantissa.inspect("demo").parameters == 1328512


def test_threads_run_calls_side_by_side() -> None:
    model = mantissa.load("demo")
    expected = model.generate("The dog", max_new_tokens=8)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(model.generate("The dog", max_new_tokens=8))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_a_server_answers_and_ends() -> None:
    import json
    import urllib.request

    with mantissa.Server("demo") as server:
        body = json.dumps({"messages": [{"role": "user", "content": "A dog"}], "max_tokens": 4}).encode()
        request = urllib.request.Request(
            server.url + "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 4
        url = server.url
    with pytest.raises(OSError):
        urllib.request.urlopen(url + "/health", timeout=1)
    with pytest.raises(mantissa.InputError, match="nowhere"):
        mantissa.Server("nowhere/at/all").start()
    with pytest.raises(mantissa.InputError, match="contxt"):
        mantissa.Server("demo", contxt=5).start()


def test_a_program_that_is_interrupted_ends_when_the_work_is_saved(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "t.txt").write_text(TEXT)
    script = (
        "import mantissa, sys\n"
        "mantissa.finetune('demo', sys.argv[1] + '/t.txt', out=sys.argv[1] + '/run', steps=100000, length=64)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 3:
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in child.communicate()[1]
    last = log.read_text().count("\n")
    saved = max(int("".join(filter(str.isdigit, path.name))) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == last, f"step {last} is in the log, the last checkpoint is of {saved}"
