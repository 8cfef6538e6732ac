#!/usr/bin/env python3
"""Compares the time of a quantization by N worker processes with that of one process with as many threads as the machine has.

    bench/workers.py MANTISSA MODEL [--recipe NAME]... [--workers N]... [--rounds N] [--samples N] [--length N]

Each round runs one process with all threads, then each number of workers, in turns; prints medians of wall time, of CPU time, and
their ratios, and checks that all outputs have the same bytes.
"""

import argparse
import hashlib
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile
import time


def digest(folder):
    files = sorted(path for path in pathlib.Path(folder).iterdir() if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def run(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - begin, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("--recipe", action="append", default=[])
    parser.add_argument("--workers", action="append", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", default="32")
    parser.add_argument("--length", default="256")
    arguments = parser.parse_args()
    threads = os.cpu_count()
    print("| recipe | workers | wall, s | CPU, s | wall, of one process |")
    print("|---|--:|--:|--:|--:|")
    for recipe in arguments.recipe or ["rtn-int4-g128", "gptq-int4-g128"]:
        counts = [0, *(arguments.workers or [4])]
        times, digests = {count: [] for count in counts}, set()
        for _ in range(arguments.rounds):
            for count in counts:
                with tempfile.TemporaryDirectory() as folder:
                    out = f"{folder}/out"
                    command = [arguments.mantissa, "quantize", arguments.model, "--recipe", recipe, "--out", out, "--threads",
                               str(threads), "--verify=false", "--quiet"]
                    if "rtn" not in recipe:
                        command += ["--calibration", "default", "--samples", arguments.samples, "--length", arguments.length]
                    times[count].append(run(command + (["--workers", str(count)] if count else [])))
                    digests.add(digest(out))
        one = statistics.median(wall for wall, _ in times[0])
        for count in counts:
            wall, cpu = (statistics.median(values) for values in zip(*times[count]))
            name = f"1 process, {threads} threads" if count == 0 else count
            print(f"| `{recipe}` | {name} | {wall:.2f} | {cpu:.2f} | {wall / one:.2f} |", flush=True)
        if len(digests) != 1:
            raise SystemExit(f"{recipe}: expected equal outputs, got {len(digests)} different ones")


if __name__ == "__main__":
    main()
