"""Workers of one job as tasks of Ray: ``python -m mantissa.ray --workers N JOB -- PROGRAM ARGS…``.

``mantissa quantize … --engine ray`` prints a script with that line. The package ``ray`` must be installed, and every machine
needs the program, the folder of the job and the model at the same paths; the package ``mantissa`` is needed on the first only.

>>> import mantissa, mantissa.ray, os, tempfile
>>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
...     job, out = os.path.join(folder, "job"), os.path.join(folder, "q")
...     made = mantissa.quantize("demo", "rtn-int4-g32", out=out, job=job, workers=2, engine="ray")
...     reports = mantissa.ray.run_units(job, units=made.units)
>>> sum(report.computed for report in reports) == made.units  # doctest: +SKIP
True
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._arguments import PathLike
from ._report import Report
from ._server import program as own_program
from .errors import EnvironmentError_, GateError, InputError, InternalError, Interrupted, MantissaError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main", "run", "run_units"]

_RESTARTS = 3
"""Times that a process which a signal killed, as the kernel does when memory is short, is started again on its machine."""

_GRACE = 1.0
"""Seconds in which workers end by themselves once the output is written."""

_PATIENCE = 15.0
"""Seconds for tasks to end after they were cancelled."""

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")
"""Ranks of what started the cluster, which every task of a machine has inherited."""

_COMMANDS = ("quantize", "convert", "eval")
"""Commands whose work is divided: what stands before one of them on a command line starts the program."""


class _Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str
    host: str


def run(
    job: PathLike,
    *,
    workers: int,
    finish: Sequence[str] | None = None,
    program: Sequence[str] | None = None,
    num_cpus: float | None = None,
    retries: int = -1,
    address: str | None = None,
) -> list[Report]:
    """Work on a job with a Ray task for each of ``workers``, and return their reports.

    ``finish`` is the command that writes the output, as words with ``--job``; it is the first of the workers. Without it, the
    command is for you to run. Tasks start in the current folder, spread over the machines of the cluster at ``address``
    (default: ``RAY_ADDRESS``, one on this machine, or a new one). Each asks for ``num_cpus`` and uses as many threads; the
    default divides the machines evenly. A task whose machine is lost starts again, ``retries`` times (-1: always).

    A worker that fails beside ``finish`` is a warning of the logger ``mantissa``, since the others do its work. Otherwise the
    first error is raised, as that of the command. What is computed stays in the folder: the same call goes on from there.

    >>> import mantissa.ray
    >>> line = ["mantissa", "quantize", "MODEL", "--recipe", "gptq-int4-g128", "--out", "o", "--job", "o.job"]
    >>> mantissa.ray.run("o.job", workers=8, finish=line)  # doctest: +SKIP
    """
    if isinstance(finish, str):
        raise InputError(f"finish: expected a list of words, got {finish!r:.80}; fix: finish=shlex.split(…)")
    if finish is not None and "--json" not in finish:
        finish = [*finish, "--json"]
    writer, reports = _run(job, workers, finish, program, _Cluster(num_cpus, retries, address))
    if writer is None:
        return reports
    if writer.code != 0:
        raise _error("the command that writes the output", writer)
    return [*_reports(writer), *reports]


def run_units(
    job: PathLike,
    units: int | Iterable[int],
    *,
    program: Sequence[str] | None = None,
    num_cpus: float = 1,
    retries: int = -1,
    address: str | None = None,
) -> list[Report]:
    """Compute units of a job with a Ray task for each, and return the reports of the tasks in the order of the units.

    ``units`` is their number, which ``--engine ray --json`` reports, or the numbers to compute. For jobs whose units do not wait
    for each other; a calibrated one raises :class:`InputError`. The output is written by the command with ``--job``.

    >>> import mantissa.ray
    >>> mantissa.ray.run_units("o.job", range(4, 8))  # doctest: +SKIP
    """
    numbers = list(range(units)) if isinstance(units, int) else list(units)
    if not numbers:
        raise InputError("units: expected at least one unit, got none")
    with _Cluster(num_cpus, retries, address).opened(len(numbers)) as cluster:
        work = _work(job, program or own_program(), num_cpus)
        names = {cluster.start([*work, f"--unit={unit}"], f"unit {unit}"): f"unit {unit}" for unit in numbers}
        reports: dict[str, list[Report]] = {}
        for name, ended in cluster.each(names):
            if ended.code != 0:
                raise _error(name, ended)
            reports[name] = _reports(ended)
    return [report for name in names.values() for report in reports[name]]


def _run(
    job: PathLike, workers: int, finish: Sequence[str] | None, program: Sequence[str] | None, plan: _Cluster
) -> tuple[_Ended | None, list[Report]]:
    """Run the tasks; return how the command that writes the output ended, and the reports of the workers."""
    if workers < 1:
        raise InputError(f"workers: expected a number from 1, got {workers}")
    reports: list[Report] = []
    with plan.opened(workers) as cluster:
        work = _work(job, program or (_program_of(finish) if finish else own_program()), cluster.cpus)
        names: dict[Any, str] = {}
        writer = None
        if finish:
            writer = cluster.start(list(finish), "writer", 0, workers)
            names[writer] = "writer"
            # The command may be the one that makes the folder.
            while not os.path.exists(os.path.join(job, "job.json")) and not cluster.has_ended(writer):
                pass
        for rank in range(len(names), workers):
            names[cluster.start(work, f"worker {rank + 1}", rank, workers)] = f"worker {rank + 1} of {workers}"
        for name, ended in cluster.each(names, last=writer):
            if name == "writer":
                return ended, reports
            if ended.code == 0:
                reports += _reports(ended)
            elif writer is None:
                raise _error(name, ended)
            else:
                import logging

                logging.getLogger("mantissa").warning(f"{name} ended early: {_error(name, ended)}")
    return None, reports


class _Cluster:
    """Cluster of Ray, and what its tasks ask for."""

    def __init__(
        self, num_cpus: float | None, retries: int, address: str | None, connected: Callable[[], object] | None = None
    ) -> None:
        self.cpus: float = num_cpus or 1
        self._connected = connected
        self._num_cpus = num_cpus
        self._retries = retries
        self._address = address
        self._ray: Any = None
        self._left: list[Any] = []

    @contextlib.contextmanager
    def opened(self, workers: int) -> Iterator[_Cluster]:
        """Connect to the cluster; at the end, cancel the tasks that are left."""
        import importlib

        try:
            self._ray = ray = importlib.import_module("ray")
        except ImportError as error:
            raise InputError(f"ray: expected the package ray, got {error}; fix: pip install ray") from None
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=self._address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise EnvironmentError_(f"ray: expected a cluster, got {_line(error)}; fix: ray start --head") from error
        try:
            if self._connected is not None:
                self._connected()
            if self._num_cpus is None:
                self.cpus = _share(ray.nodes(), workers)
            yield self
        finally:
            try:
                self._stop()
            finally:
                if ours:
                    ray.shutdown()

    def start(self, words: list[str], name: str, rank: int | None = None, count: int = 0) -> Any:
        """Start a task that runs a program."""
        ray = self._ray
        # Machines of the cluster need not have this package.
        here = sys.modules[__name__]
        ray.cloudpickle.register_pickle_by_value(here)
        try:
            task = ray.remote(_supervise).options(
                name=f"mantissa {name}", num_cpus=self.cpus, max_retries=self._retries, scheduling_strategy="SPREAD"
            )
            variables = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(count)}
            reference = task.remote(words, os.getcwd(), variables, _RANKS, _RESTARTS)
        finally:
            ray.cloudpickle.unregister_pickle_by_value(here)
        self._left.append(reference)
        return reference

    def has_ended(self, reference: Any) -> bool:
        """Wait a moment for a task; true if it has ended."""
        ended, _ = self._ray.wait([reference], timeout=0.1)
        return bool(ended)

    def each(self, names: Mapping[Any, str], last: Any = None) -> Iterator[tuple[str, _Ended]]:
        """Yield tasks as they end, and ``last`` after those that end soon after it."""
        ray = self._ray
        while self._left:
            ended, self._left = ray.wait(self._left, num_returns=1)
            [reference] = ended
            if reference is last and self._left:
                soon, self._left = ray.wait(self._left, num_returns=len(self._left), timeout=_GRACE)
                for other in soon:
                    yield names[other], self._result(names[other], other)
            yield names[reference], self._result(names[reference], reference)

    def _result(self, name: str, reference: Any) -> _Ended:
        ray = self._ray
        try:
            return _Ended(*ray.get(reference))
        except ray.exceptions.RayError as error:
            raise EnvironmentError_(f"{name}: expected a task that ends, got {_line(error)}") from error

    def _stop(self) -> None:
        """Cancel the tasks that are left, and wait until their processes have ended."""
        left, self._left = self._left, []
        for reference in left:
            self._ray.cancel(reference)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_PATIENCE)


def _supervise(
    words: list[str], folder: str, variables: dict[str, str], without: Sequence[str], restarts: int
) -> tuple[int, str, str, str]:
    """Run a program to its end, again if a signal killed it; return exit code, output, errors and machine.

    Runs on machines that may not have this package: it uses the standard library alone.
    """
    import os
    import socket
    import subprocess
    import tempfile

    host = socket.gethostname()
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment.update(variables)
    while True:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                process = subprocess.Popen(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )
            except OSError as error:
                what = f"{words[0]}: expected this program, and the folder {folder}, on every machine"
                return 3, "", f"error: {what}, got {error.strerror}: {error.filename}; fix: share them", host
            try:
                # A wait without an end would not be interrupted when the task is cancelled.
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.2)
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(timeout=5)
                    except BaseException:
                        process.kill()
                        process.wait()
            code = process.returncode
            if code < 0 and restarts > 0:
                restarts -= 1
                continue
            out.seek(0)
            err.seek(0)
            return code, out.read().decode(errors="replace"), err.read().decode(errors="replace"), host


def _share(nodes: Sequence[Mapping[str, Any]], workers: int) -> int:
    """Return the CPUs of one worker if machines are divided evenly: those of the smallest with as many workers as any."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    cpus = [count for count in cpus if count > 0]
    return max(1, min(cpus) // -(-workers // len(cpus))) if cpus else 1


def _program_of(line: Sequence[str]) -> list[str]:
    """Return the words that start the program of a command line."""
    at = next((at for at, word in enumerate(line) if at > 0 and word in _COMMANDS), 1)
    return list(line[:at])


def _work(job: PathLike, program: Sequence[str], cpus: float) -> list[str]:
    """Return the words that work on a job."""
    threads = [] if any(word.startswith("--threads") for word in program) else [f"--threads={max(1, int(cpus))}"]
    return [*program, "worker", os.fspath(job), "--json", *threads]


def _reports(ended: _Ended) -> list[Report]:
    """Return the report that a program printed, if it did."""
    import json

    try:
        return [Report(json.loads(ended.out))]
    except ValueError:
        return []


def _line(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _error(name: str, ended: _Ended) -> MantissaError:
    """Return the exception for a program that failed: its message, of the class of its exit code."""
    if ended.code < 0:
        signal = f"signal {-ended.code}, {_RESTARTS + 1} times"
        fix = "fewer workers to a machine, or --memory"
        return EnvironmentError_(f"{name} on {ended.host}: expected a process that ends, got {signal}; fix: {fix}")
    lines = [line for line in ended.err.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
    message = said.removeprefix("error: ") or f"{name} on {ended.host}: expected exit code 0, got {ended.code}"
    kinds: dict[int, type[MantissaError]] = {
        1: GateError, 2: InputError, 3: EnvironmentError_, 130: Interrupted, 143: Interrupted,
    }
    return kinds.get(ended.code, InternalError)(message, ended.out if ended.code == 1 and _reports(ended) else "")


_CODES: dict[type[MantissaError], int] = {GateError: 1, InputError: 2, EnvironmentError_: 3, Interrupted: 130}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code of the command that writes the output."""
    import argparse
    import signal

    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m mantissa.ray", usage="%(prog)s --workers N [OPTIONS] JOB [-- PROGRAM ARGS…]",
        description="Work on a job with tasks of Ray. PROGRAM ARGS… is the command that writes the output, one of the N.",
    )
    parser.add_argument("job", metavar="JOB", help="folder of the job")
    parser.add_argument("--workers", metavar="N", type=int, required=True, help="number of tasks")
    parser.add_argument("--num-cpus", metavar="C", type=float, help="CPUs and threads of a task [default: an even share]")
    parser.add_argument(
        "--retries", metavar="R", type=int, default=-1,
        help="new starts of a task whose machine is lost [default: -1, always]",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="cluster [default: RAY_ADDRESS, one on this machine, or a new one]"
    )
    given = parser.parse_args(words[:at])

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def connected() -> None:
        # A scheduler ends its jobs by SIGTERM: the processes of the tasks are to end as well. Ray sets a handler of its own.
        signal.signal(signal.SIGTERM, stop)

    try:
        plan = _Cluster(given.num_cpus, given.retries, given.address, connected)
        writer, reports = _run(given.job, given.workers, words[at + 1 :] or None, None, plan)
    except MantissaError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CODES.get(type(error), 4)
    except KeyboardInterrupt:
        print("Interrupted. Rerun the same command to resume.", file=sys.stderr)
        return 130
    if writer is None:
        print(f"{given.job}: {sum(report['computed'] for report in reports)} units computed")
        return 0
    sys.stderr.write(writer.err)
    sys.stdout.write(writer.out)
    if writer.code < 0:
        print(f"error: {_error('the command that writes the output', writer)}", file=sys.stderr)
    return 3 if writer.code < 0 else writer.code


if __name__ == "__main__":
    sys.exit(main())
