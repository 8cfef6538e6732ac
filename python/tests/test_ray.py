"""Jobs by tasks of Ray: with a stand-in for it wherever the tests run, and with Ray where it is installed."""

from __future__ import annotations

import ctypes
import doctest
import importlib.util
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

import mantissa
import mantissa.ray

PROGRAM = '''
import json, os, pathlib, signal, sys, time

command, *words = sys.argv[1:]
place = pathlib.Path(os.environ["FAKE"])
mode = (place / "mode").read_text() if (place / "mode").exists() else ""
with open(place / "calls", "a") as calls:
    calls.write(json.dumps([command, words, os.environ.get("RANK"), os.environ.get("PMI_RANK"), os.getpid(), os.getcwd()]) + "\\n")
if command == "worker":
    if mode == "input" and os.environ.get("RANK") != "1" or mode == "one" and os.environ.get("RANK") == "1":
        print("note: looked\\nerror: o.job: expected the folder of a job, got a file; fix: name a folder", file=sys.stderr)
        sys.exit(2)
    if mode == "killed" or mode == "once" and not (place / "killed").exists():
        (place / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "sleep":
        time.sleep(600)
    unit = next((int(word.removeprefix("--unit=")) for word in words if word.startswith("--unit=")), None)
    print(json.dumps({"job": words[0], "computed": 1 if unit is None else unit}))
else:
    if mode == "late":
        time.sleep(0.5)
        assert not any("worker" in line for line in open(place / "calls"))
    (place / "job").mkdir(exist_ok=True)
    (place / "job" / "job.json").touch()
    if mode == "sleep":
        time.sleep(600)
    print("a note", file=sys.stderr)
    if mode == "gate":
        print("error: kl: expected at most 0.1, got 0.2", file=sys.stderr)
        print(json.dumps({"kl": 0.2}))
        sys.exit(1)
    print(json.dumps({"out": "o"}) if "--json" in words else "written")
'''


class StandIn(types.ModuleType):
    """The calls of Ray that the package uses, on threads."""

    class cloudpickle:  # noqa: N801
        @staticmethod
        def register_pickle_by_value(module: types.ModuleType) -> None:
            assert hasattr(module, "_supervise")

        unregister_pickle_by_value = register_pickle_by_value

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.options: list[dict[str, Any]] = []
        self.is_up = False

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, address: str | None, log_to_driver: bool) -> None:
        if address == "nowhere":
            raise ConnectionError("no cluster at nowhere\nand more")
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def remote(self, function: Any) -> Any:
        outer = self

        class Task:
            def options(self, **options: Any) -> Task:
                outer.options.append(options)
                return self

            def remote(self, *arguments: Any) -> Running:
                # What a task is given goes to another machine.
                return Running(function, pickle.loads(pickle.dumps(arguments)))

        return Task()

    def wait(self, left: list[Running], *, num_returns: int = 1, timeout: float | None = None) -> Any:
        deadline = time.monotonic() + (60 if timeout is None else timeout)
        while sum(one.done for one in left) < num_returns and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = [one for one in left if one.done][:num_returns]
        return ended, [one for one in left if one not in ended]

    def get(self, one: Running) -> Any:
        if isinstance(one.result, BaseException):
            raise self.exceptions.RayError(f"{one.result!r}\ntrace")
        return one.result

    def cancel(self, one: Running) -> None:
        if not one.done:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(one.thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )


class Running:
    def __init__(self, function: Any, arguments: Any) -> None:
        self.result: Any = None
        self.done = False

        def body() -> None:
            try:
                self.result = function(*arguments)
            except BaseException as error:
                self.result = error
            self.done = True

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()


class Fake:
    """A program that behaves as told, and writes down how it was called."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "fake.py").write_text(PROGRAM)
        self.program = [sys.executable, str(place / "fake.py")]
        self.job = place / "job"

    def behaves(self, mode: str) -> None:
        (self.place / "mode").write_text(mode)

    def finish(self, *more: str) -> list[str]:
        return [*self.program, "quantize", "MODEL", *more]

    def calls(self) -> list[list[Any]]:
        path = self.place / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def running(self) -> list[int]:
        return [call[4] for call in self.calls() if Path(f"/proc/{call[4]}").exists()]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PMI_RANK", "9")
    # Workers are waited for, however busy the machine is.
    monkeypatch.setattr(mantissa.ray, "_GRACE", 60.0)
    monkeypatch.chdir(tmp_path)
    return Fake(tmp_path)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def test_one_task_writes_and_the_others_work(fake: Fake, ray: StandIn) -> None:
    fake.behaves("late")
    reports = mantissa.ray.run(fake.job, workers=3, finish=fake.finish())
    assert [dict(report) for report in reports] == [{"out": "o"}, *[{"job": str(fake.job), "computed": 1}] * 2]
    [writer, *others] = sorted(fake.calls(), key=lambda call: call[2])
    assert writer[:4] == ["quantize", ["MODEL", "--json"], "0", None]
    assert [call[:4] for call in others] == [["worker", [str(fake.job), "--json", "--threads=1"], rank, None] for rank in "12"]
    assert {call[5] for call in fake.calls()} == {str(fake.place)}
    assert [options["num_cpus"] for options in ray.options] == [1] * 3
    assert all(options["max_retries"] == -1 and options["scheduling_strategy"] == "SPREAD" for options in ray.options)
    assert not ray.is_up


def test_workers_alone_and_a_cluster_that_stays(fake: Fake, ray: StandIn) -> None:
    ray.is_up = True
    reports = mantissa.ray.run(fake.job, workers=2, program=fake.program, num_cpus=2.5, retries=4)
    assert [report.computed for report in reports] == [1, 1]
    assert all(call[1][-1] == "--threads=2" for call in fake.calls())
    assert {(options["num_cpus"], options["max_retries"]) for options in ray.options} == {(2.5, 4)}
    assert ray.is_up


def test_each_unit_is_a_task(fake: Fake, ray: StandIn) -> None:
    reports = mantissa.ray.run_units(fake.job, 5, program=fake.program)
    assert [report.computed for report in reports] == [0, 1, 2, 3, 4]
    assert [report.computed for report in mantissa.ray.run_units(fake.job, (7, 3), program=fake.program)] == [7, 3]
    with pytest.raises(mantissa.InputError, match="at least one unit"):
        mantissa.ray.run_units(fake.job, [], program=fake.program)


def test_errors_are_those_of_the_command(fake: Fake, ray: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    fake.behaves("input")
    with pytest.raises(mantissa.InputError) as wrong:
        mantissa.ray.run(fake.job, workers=1, program=fake.program)
    assert str(wrong.value) == "o.job: expected the folder of a job, got a file; fix: name a folder"
    assert wrong.value.fix == "name a folder"
    fake.behaves("gate")
    with pytest.raises(mantissa.GateError, match="at most 0.1") as gate:
        mantissa.ray.run(fake.job, workers=2, finish=fake.finish())
    assert gate.value.report is not None and gate.value.report.kl == 0.2
    # Beside the command that writes the output, a worker that fails costs time alone.
    fake.behaves("one")
    with caplog.at_level(logging.WARNING, logger="mantissa"):
        reports = mantissa.ray.run(fake.job, workers=3, finish=fake.finish())
    assert [sorted(report) for report in reports] == [["out"], ["computed", "job"]]
    assert caplog.messages == [f"worker 2 of 3 ended early: {wrong.value}"]
    with pytest.raises(mantissa.EnvironmentError_, match="expected this program, and the folder"):
        mantissa.ray.run(fake.job, workers=1, program=["/nowhere/mantissa"])
    for arguments in ({"workers": 0}, {"workers": 1, "finish": "mantissa quantize"}):
        with pytest.raises(mantissa.InputError):
            mantissa.ray.run(fake.job, **arguments)  # type: ignore[arg-type]
    with pytest.raises(mantissa.EnvironmentError_, match="got no cluster at nowhere; fix"):
        mantissa.ray.run(fake.job, workers=1, program=fake.program, address="nowhere")


def test_a_killed_process_starts_again(fake: Fake, ray: StandIn) -> None:
    fake.behaves("once")
    assert len(mantissa.ray.run(fake.job, workers=1, program=fake.program)) == 1
    assert len(fake.calls()) == 2
    fake.behaves("killed")
    with pytest.raises(mantissa.EnvironmentError_, match="got signal 9, 4 times; fix: "):
        mantissa.ray.run(fake.job, workers=1, program=fake.program)
    assert len(fake.calls()) == 6


def interrupted(fake: Fake, call: Any) -> None:
    def interrupt() -> None:
        while len(fake.calls()) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    sender.join()
    assert len(fake.calls()) == 3 and fake.running() == []


def test_ctrl_c_ends_the_processes(fake: Fake, ray: StandIn) -> None:
    fake.behaves("sleep")
    interrupted(fake, lambda: mantissa.ray.run(fake.job, workers=3, finish=fake.finish()))


def test_a_worker_that_is_left_over_ends(fake: Fake, ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mantissa.ray, "_GRACE", 0.2)
    fake.behaves("sleep")
    script = "import pathlib, os; pathlib.Path(os.environ['FAKE'], 'job').mkdir(); open('job/job.json', 'w'); print('{}')"
    finish = [sys.executable, "-c", script]
    reports = mantissa.ray.run(fake.job, workers=2, finish=finish, program=fake.program)
    assert len(reports) == 1 and fake.running() == []


def test_the_command_line(fake: Fake, ray: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    def main(*arguments: str) -> tuple[int, str, str]:
        before = signal.getsignal(signal.SIGTERM)
        try:
            return (mantissa.ray.main(arguments), *capfd.readouterr())
        finally:
            signal.signal(signal.SIGTERM, before)

    line = ["--workers", "2", str(fake.job), "--", *fake.finish("--out", "o")]
    assert main(*line) == (0, "written\n", "a note\n")
    assert ["worker", [str(fake.job), "--json", "--threads=2"]] in [call[:2] for call in fake.calls()]
    fake.behaves("gate")
    assert main(*line) == (1, '{"kl": 0.2}\n', "a note\nerror: kl: expected at most 0.1, got 0.2\n")
    code, out, err = main("--workers", "0", "job")
    assert (code, out, err) == (2, "", "error: workers: expected a number from 1, got 0\n")
    with pytest.raises(SystemExit):
        main("--workers", "x", "job")


def test_without_ray_the_error_says_how_to_install_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(mantissa.InputError, match="pip install ray") as missing:
        mantissa.ray.run(fake.job, workers=2)
    assert missing.value.fix == "pip install ray"


def test_machines_are_divided_evenly() -> None:
    def share(workers: int, *cpus: float) -> int:
        return mantissa.ray._share([{"Alive": True, "Resources": {"CPU": count}} for count in cpus], workers)

    assert [share(1, 8), share(3, 8), share(9, 8), share(4, 64, 64, 64, 64), share(8, 64, 32, 0)] == [8, 2, 1, 64, 8]
    assert share(4) == 1 == mantissa.ray._share([{"Alive": False, "Resources": {"CPU": 8.0}}], 1)


def test_a_line_names_its_program() -> None:
    for words, expected in {
        "/opt/mantissa quantize MODEL": ["/opt/mantissa"],
        "python3 -I -S __main__.py convert quantize": ["python3", "-I", "-S", "__main__.py"],
        "quantize quantize MODEL": ["quantize"],
        "mantissa": ["mantissa"],
    }.items():
        assert mantissa.ray._program_of(words.split()) == expected


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray = importlib.import_module("ray")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@needs_ray
def test_ray_runs_works_and_interrupts(fake: Fake, cluster: Any) -> None:
    # A task has the environment of the cluster, not of the driver.
    program = ["env", f"FAKE={fake.place}", *fake.program]
    finish = [*program, "quantize", "MODEL"]
    fake.behaves("late")
    reports = mantissa.ray.run(fake.job, workers=3, finish=finish)
    assert [sorted(report) for report in reports] == [["out"], *[["computed", "job"]] * 2]
    assert [report.computed for report in mantissa.ray.run_units(fake.job, 4, program=program)] == [0, 1, 2, 3]
    fake.behaves("input")
    with pytest.raises(mantissa.InputError, match="name a folder"):
        mantissa.ray.run(fake.job, workers=1, program=program)
    fake.behaves("sleep")
    (fake.place / "calls").unlink()
    interrupted(fake, lambda: mantissa.ray.run(fake.job, workers=3, finish=finish))


@needs_ray
def test_ray_has_the_bytes_of_the_command(command: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = [command, "quantize", "demo", "--recipe", "rtn-int4-g32", "--quiet", "--out"]
    subprocess.run([*line, "alone"], check=True)
    script = [*line, "units", "--job", "units.job", "--workers", "2", "--engine", "ray", "--json"]
    units = json.loads(subprocess.run(script, check=True, capture_output=True).stdout)["units"]
    reports = mantissa.ray.run_units("units.job", units, program=[command])
    assert sum(report.computed for report in reports) == units
    [report] = mantissa.ray.run("units.job", workers=1, finish=[*line, "units", "--job", "units.job"])
    assert report.output == "units"
    mantissa.ray.run("three.job", workers=3, finish=[*line, "three", "--job", "three.job"])
    for name in ("units", "three"):
        for path in Path("alone").iterdir():
            assert path.read_bytes() == (Path(name) / path.name).read_bytes(), (name, path.name)


@needs_ray
def test_the_examples_run(cluster: Any) -> None:
    examples = (mantissa.ray.__doc__ or "").replace("  # doctest: +SKIP", "")
    test = doctest.DocTestParser().get_doctest(examples, {}, "mantissa.ray", None, None)
    assert len(test.examples) == 3
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
