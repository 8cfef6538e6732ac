#!/usr/bin/env python3
"""Divides jobs among workers that each engine starts, and compares every output file with that of one process.

    pip install ray==2.60.0 mpich==5.0.2 kubernetes-validate==1.37.0
    apt-get install slurm-wlm munge
    tests/interop/workers.py MANTISSA [--only ENGINE…] [--work DIR]

Engines: threads, workers (`--workers` 2 to 4), shells (`mantissa worker` by hand), mpi (mpiexec), slurm (sbatch; a cluster of
this machine is set up by slurm_loopback.sh unless SLURM_CONF names one), ray (`python3 -m mantissa.ray` of this tree), k8s (the
manifest against the schema of Kubernetes, then its command line with the variables of an indexed Job). One that is not
installed is skipped, with a note. Prints a table; exit 1 if a file differs or a run fails.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = "--hidden 64 --layers 2 --ffn 128 --heads 4 --kv-heads 2 --vocab 64".split()
COUNT = 3
"""Processes of an engine."""
PATIENCE = 300
"""Most seconds of a run."""


class Failure(Exception):
    """A run that failed, with its last words."""


class Place:
    """Folder with a model, calibration windows, and the jobs."""

    def __init__(self, program, folder):
        self.program = program
        # Scripts must quote such a path.
        self.folder = folder / "a folder"
        self.folder.mkdir(parents=True)
        self.run([program, "synth", "--out", "model", "--preset", "tiny", *SIZES])
        windows = [[(i * 7 + seed * 13) % 60 for i in range(32)] for seed in range(1, 5)]
        (self.folder / "windows.json").write_text(json.dumps({"w": windows}))
        calibrated = ["--calibration-tokens", "windows.json:w"]
        self.jobs = {
            "rtn-int4-g32": ["quantize", "model", "--recipe", "rtn-int4-g32"],
            "gptq-int4-g32": ["quantize", "model", "--recipe", "gptq-int4-g32", *calibrated],
            "q4_0.gguf": ["quantize", "model", "--recipe", "rtn-q4_0"],
            "convert": ["convert", "one/rtn-int4-g32", "--format", "gptq"],
        }
        self.expected = {}
        for job in self.jobs:
            self.run([*self.line(job, "one"), "--threads", "1"])
            self.expected[job] = self.hashes(job, "one")
            assert self.expected[job], job

    def line(self, job, way):
        """Return the command of a job, as words."""
        return [self.program, *self.jobs[job], "--out", f"{way}/{job}"]

    def run(self, words, stdin=None, **variables):
        """Run a program to its end, and return what it prints."""
        done = subprocess.run(words, cwd=self.folder, env={**os.environ, **variables}, input=stdin, text=True,
                              stdin=None if stdin is not None else subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
        if done.returncode != 0:
            raise Failure(f"{words[0]}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}")
        return done.stdout

    def together(self, lines):
        """Run programs side by side; each line has its words and variables."""
        running = [subprocess.Popen(words, cwd=self.folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for words, variables in lines]
        try:
            for process in running:
                _, said = process.communicate(timeout=PATIENCE)
                if process.returncode != 0:
                    raise Failure(f"{process.args[0]}: exit {process.returncode}: {said.strip()[-400:]}")
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def script(self, job, engine):
        """Return the script of an engine."""
        return self.run([*self.line(job, engine), "--workers", str(COUNT), "--engine", engine])

    def hashes(self, job, way):
        """Return the SHA-256 of every file of an output, and of what lies beside a GGUF file."""
        out = self.folder / way / job
        found = sorted(out.rglob("*")) if out.is_dir() else sorted(out.parent.glob(out.name + "*"))
        found = [path for path in found if path.is_file() and ".job" not in "".join(path.relative_to(out.parent).parts[:1])]
        return {str(path.relative_to(out.parent)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def solvers(self, job, way):
        """Return the number of processes whose results are in the folder of a job; 0 if it is gone."""
        headers = []
        for path in (self.folder / way / f"{job}.job" / "units").glob("*.unit"):
            with path.open("rb") as file:
                headers.append(json.loads(file.readline()))
        empty = sum(header["result"]["bytes"] == 0 for header in headers)
        if empty:
            # Every worker would solve these, and no result of another would be compared.
            raise Failure(f"{empty} of {len(headers)} units have an empty result: they are not exchanged")
        return len({header["worker"] for header in headers})


def threads(place, job, way):
    place.run([*place.line(job, way), "--threads", "2"])


def local(count):
    def run(place, job, way):
        place.run([*place.line(job, way), "--workers", str(count)])
        left = place.folder / way / f"{job}.job"
        if left.exists():
            raise Failure(f"{left} is left")
    return run


def shells(place, job, way):
    folder = f"{way}/{job}.job"
    # An engine's script is printed once the folder is made: here it makes the folder, and shells do the rest.
    place.run([*place.line(job, way), "--job", folder, "--workers", str(COUNT), "--engine", "mpi"])
    work = f'exec "$0" worker {folder}'
    lines = [(["sh", "-c", work, place.program], {}) for _ in range(COUNT - 1)]
    place.together([*lines, ([*place.line(job, way), "--job", folder], {})])


def mpi(place, job, way):
    place.run(["sh"], stdin=place.script(job, "mpi"))


def slurm(place, job, way):
    try:
        place.run(["sbatch", "--wait", f"--output={way}-{job}-%a.log"], stdin=place.script(job, "slurm"))
    except Failure as error:
        logs = sorted(place.folder.glob(f"{way}-{job}-*.log"))
        raise Failure(f"{error}: {[log.read_text().strip()[-200:] for log in logs]}") from error


def ray(place, job, way):
    paths = {"PYTHONPATH": str(HERE.parents[1] / "python"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    place.run(["sh"], stdin=place.script(job, "ray"), **paths)


def kubernetes(place, job, way):
    import kubernetes_validate
    import yaml

    manifest = yaml.safe_load(place.script(job, "k8s"))
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    spec = manifest["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["workingDir"] == str(place.folder), container["workingDir"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    with tempfile.TemporaryDirectory() as image:
        os.symlink(place.program, Path(image, "mantissa"))
        variables["PATH"] = f"{image}:{os.environ['PATH']}"
        pods = [{**variables, "JOB_COMPLETION_INDEX": str(index)} for index in range(spec["completions"])]
        place.together([(container["command"], pod) for pod in pods])


WAYS = {
    "threads": ("threads", threads, []),
    "workers 2": ("workers", local(2), []),
    "workers 3": ("workers", local(3), []),
    "workers 4": ("workers", local(4), []),
    "shells": ("shells", shells, []),
    "mpi": ("mpi", mpi, ["program mpiexec"]),
    "slurm": ("slurm", slurm, ["program sbatch", "program slurmctld", "program munged"]),
    "ray": ("ray", ray, ["package ray"]),
    "k8s": ("k8s", kubernetes, ["package kubernetes_validate"]),
}


def missing(needs):
    """Return what is not installed."""
    def is_there(need):
        kind, name = need.split()
        return shutil.which(name) if kind == "program" else importlib.util.find_spec(name)
    return [need for need in needs if not is_there(need)]


def compare(place, job, name, run):
    """Run a job one way; return a word for the table, and the fault if there is one."""
    way, begin = name.replace(" ", "-"), time.monotonic()
    try:
        run(place, job, way)
        found, solvers = place.hashes(job, way), place.solvers(job, way)
    except (Failure, AssertionError, subprocess.TimeoutExpired) as error:
        return "FAILED", f"{name}, {job}: {error}"
    except Exception as error:  # noqa: BLE001: a schema's errors have types of their own
        return "FAILED", f"{name}, {job}: {type(error).__name__}: {str(error)[:400]}"
    expected = place.expected[job]
    differing = sorted(file for file in found.keys() | expected.keys() if found.get(file) != expected.get(file))
    if differing:
        return "DIFFERS", f"{name}, {job}: {', '.join(differing)}"
    return f"{len(found)} equal, {f'by {solvers}, ' if solvers else ''}{time.monotonic() - begin:.1f} s", None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", metavar="MANTISSA")
    parser.add_argument("--only", metavar="ENGINE", nargs="+", choices=sorted({engine for engine, _, _ in WAYS.values()}))
    parser.add_argument("--work", metavar="DIR", help="folder that is kept [default: a temporary one]")
    given = parser.parse_args()
    # Programs of the environment that runs this, and those of the system's administrator.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    chosen = {name: way for name, way in WAYS.items() if given.only is None or way[0] in given.only}
    faults, table = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.work or temporary).resolve()
        place = Place(str(Path(given.program).resolve()), folder)
        table.append(["", *place.jobs])
        cluster = None
        try:
            for name, (_, run, needs) in chosen.items():
                lacking = missing(needs)
                if lacking:
                    table.append([name, f"skipped: no {', '.join(lacking)}"])
                    continue
                if name == "slurm" and "SLURM_CONF" not in os.environ:
                    cluster = folder / "slurm"
                    subprocess.run([HERE / "slurm_loopback.sh", "start", cluster], check=True, stdout=subprocess.DEVNULL)
                    os.environ["SLURM_CONF"] = str(cluster / "slurm.conf")
                row = [name]
                for job in place.jobs:
                    word, fault = compare(place, job, name, run)
                    row.append(word)
                    faults += [fault] if fault else []
                    print(f"{name}, {job}: {word}", file=sys.stderr, flush=True)
                table.append(row)
        finally:
            if cluster is not None:
                subprocess.run([HERE / "slurm_loopback.sh", "stop", cluster], check=False)
    widths = [max(len(row[at]) for row in table if len(row) > max(at, 2)) for at in range(len(table[0]))]
    for row in table:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
