#!/usr/bin/env python3
"""Prefill and decode speed of mantissa and of its peers on the same GGUF files.

    bench/peers.py --build FOLDER [--ik-source SOURCE]
    bench/peers.py --model FILE.gguf ... --mantissa BINARY --llama-bench BINARY --ik-llama-bench BINARY --out NAME

The first form builds llama.cpp, and ik_llama.cpp from a source folder, for this processor; it needs cmake and a C++ compiler. The
second measures every program once per round, in an order that shifts by one each round, and writes NAME.json and NAME.md: medians,
the range over the rounds, and the ratio of mantissa's median to each peer's. Programs without a path are left out. "Other CPU" is
the mean number of processors that other processes and the hypervisor used during a run. A run with more than --max-other is
repeated; figures compare only if it is near zero in the end.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
import typing

# The release of llama-cpp-python whose source archive has the llama.cpp to build.
LLAMA_CPP_PYTHON = "0.3.36"

# No shared libraries, no network, no tools but the benchmark; -march=native.
CMAKE = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
]
CMAKE_LLAMA = [
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
]

# llama-bench of ik_llama.cpp is one of its examples.
CMAKE_IK = ["-DLLAMA_BUILD_EXAMPLES=ON"]

# Flags of /proc/cpuinfo that decide which kernels a program runs.
ISA = ["avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimddp", "i8mm", "sve"]

# Figures of `mantissa bench --json` for the table, besides the speeds.
MANTISSA_KEPT = ["machine_read_gb_per_s", "pp_share_of_peak", "tg_share_of_bandwidth"]

FLOAT_KV = ["f16", "bf16", "f32"]
PHASES = ["pp", "tg"]
TICKS = os.sysconf("SC_CLK_TCK")


class Program(typing.NamedTuple):
    """A benchmark binary with one choice of options."""

    name: str
    binary: str
    # (model, depth) to the arguments that measure once; None if the program cannot.
    arguments: typing.Callable
    # Standard output of a run to its figures, among them `pp` and `tg` in tokens per second.
    figures: typing.Callable


def programs(args):
    """Programs to measure, mantissa first."""
    found = []
    if args.mantissa:
        found.append(Program("mantissa", args.mantissa, functools.partial(mantissa_arguments, args), mantissa_figures))
    if args.llama_bench:
        # Without flash attention llama.cpp takes no quantized V cache.
        for flash in [0, 1] if (args.kv or "f16") in FLOAT_KV else [1]:
            arguments = functools.partial(llama_arguments, args, flash)
            found.append(Program(f"llama.cpp fa={flash}", args.llama_bench, arguments, llama_figures))
    if args.ik_llama_bench:
        for repack in (0, 1):
            arguments = functools.partial(ik_llama_arguments, args, repack)
            found.append(Program(f"ik_llama.cpp rtr={repack}", args.ik_llama_bench, arguments, llama_figures))
    if args.mistralrs:
        found.append(Program("mistral.rs", args.mistralrs, functools.partial(mistralrs_arguments, args), mistralrs_figures))
    return found


def mantissa_arguments(args, model, depth):
    arguments = ["bench", model, "--prompt", args.prompt, "--gen", args.gen, "--depth", depth, "--threads", args.threads]
    return [*arguments, "--reps", 1, "--json"] + (["--kv", args.kv] if args.kv else [])


def mantissa_figures(output):
    found = scalars(json_of(output))
    figures = {"pp": found.get("pp_tokens_per_s"), "tg": found.get("tg_tokens_per_s")}
    return figures | {k: found[k] for k in MANTISSA_KEPT if k in found}


def llama_common(args, model, flash):
    arguments = ["-m", model, "-t", args.threads, "-r", 1, "-o", "json", "-fa", flash]
    return arguments + (["-ctk", args.kv, "-ctv", args.kv] if args.kv else [])


def llama_arguments(args, flash, model, depth):
    return [*llama_common(args, model, flash), "-p", args.prompt, "-n", args.gen, "-d", depth]


def ik_llama_arguments(args, repack, model, depth):
    arguments = [*llama_common(args, model, 1), "-rtr", repack]
    # It has no -d. -gp times the decode after a prompt, so prefill at depth stays unmeasured.
    if depth:
        return [*arguments, "-p", 0, "-n", 0, "-gp", f"{depth},{args.gen}"]
    return [*arguments, "-p", args.prompt, "-n", args.gen]


def llama_figures(output):
    rows = json_of(output)
    return {"tg" if row["n_gen"] else "pp": row["avg_ts"] for row in rows} | {"build": rows[0]["build_commit"]}


def mistralrs_arguments(args, model, depth):
    if depth or args.kv:
        return None
    arguments = ["bench", "--cpu", "--format", "gguf", "-m", model.parent, "-f", model.name, "--iterations", 1, "--warmup", 1]
    return [*arguments, "--prompt-len", args.prompt, "--gen-len", args.gen]


def mistralrs_figures(output):
    # A row of its table: │ Prefill (512 tokens) ┆ 123.4 ± 0.0 ┆ … Its decode figure includes the prefill of four tokens.
    rows = {phase: re.search(rf"{name} \(\d+ tokens\)\D+([\d.]+)", output) for phase, name in [("pp", "Prefill"), ("tg", "Decode")]}
    return {phase: float(match[1]) for phase, match in rows.items() if match}


def json_of(output):
    """First JSON object or array in a program's output, which may have other lines around it."""
    for start in re.finditer(r"[\[{]", output):
        try:
            return json.JSONDecoder().raw_decode(output, start.start())[0]
        except json.JSONDecodeError:
            continue
    raise ValueError("no JSON in its output")


def scalars(value):
    """Scalar fields of nested objects and arrays as one dictionary; outer ones win."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = {}
    for _, item in pairs:
        found |= scalars(item) if isinstance(item, (dict, list)) else {}
    return found | {k: v for k, v in pairs if not isinstance(v, (dict, list))}


def busy_seconds():
    """CPU seconds of the whole machine not idle, time stolen by the hypervisor included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def own_seconds():
    """CPU seconds of finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(program, model, depth, args):
    """Runs a program once: its figures, or the error; None if the program cannot."""
    arguments = program.arguments(model, depth)
    if arguments is None:
        return None
    # mistral.rs has no option for its threads.
    environment = os.environ | {"RAYON_NUM_THREADS": str(args.threads)}
    busy, own, start = busy_seconds(), own_seconds(), time.monotonic()
    try:
        command = [program.binary, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    except OSError as error:
        return {"error": str(error)}
    wall = time.monotonic() - start
    others = max(0.0, busy_seconds() - busy - (own_seconds() - own)) / wall
    run = {"wall_s": round(wall, 2), "other_cpu": round(others, 3), "load1": os.getloadavg()[0]}
    try:
        if done.returncode:
            raise ValueError(f"exit {done.returncode}")
        figures = program.figures(done.stdout)
        if not any(figures.get(phase) for phase in PHASES):
            raise ValueError("no figures in its output")
        return run | figures
    except (ValueError, LookupError, TypeError) as error:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return run | {"error": f"{error}: {last}"}


def quiet(program, model, depth, args):
    """Repeats a run that other processes disturbed; the least disturbed one if all were."""
    runs = []
    while len(runs) < args.tries:
        wait_for_idle(args.max_other)
        run = measure(program, model, depth, args)
        if run is None or "error" in run or run["other_cpu"] <= args.max_other:
            return run
        runs.append(run)
    return min(runs, key=lambda run: run["other_cpu"])


def wait_for_idle(limit):
    """Waits, for two minutes at most, until the machine was idle for two seconds."""
    for _ in range(60):
        busy = busy_seconds()
        time.sleep(2)
        if (busy_seconds() - busy) / 2 <= limit:
            return


def summary(rows):
    """Median, minimum and maximum of the runs of one program; None for a phase without figures."""
    values = {phase: [r[phase] for r in rows if r.get(phase)] for phase in PHASES}
    return {p: {"median": statistics.median(v), "min": min(v), "max": max(v)} if v else None for p, v in values.items()}


def compare(summaries):
    """Adds mantissa's ratio to every program, and returns the fastest peer of each phase."""
    best = {}
    for phase in PHASES:
        median = {name: s[phase]["median"] for name, s in summaries.items() if s[phase]}
        for name, value in median.items():
            summaries[name][phase]["ratio"] = median["mantissa"] / value if "mantissa" in median else None
        peers = {name: value for name, value in median.items() if name != "mantissa"}
        if peers:
            name = max(peers, key=peers.get)
            best[phase] = {"program": name, "ratio": summaries[name][phase]["ratio"]}
    return best


def number(value):
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def table(case, args):
    """Markdown of one model at one depth."""
    heads = [f"{phase}{n} tok/s | min–max | ratio" for phase, n in [("pp", args.prompt), ("tg", args.gen)]]
    at = f" at depth {case['depth']}" if case["depth"] else ""
    lines = [f"## {case['model']}{at}", "", f"| program | {' | '.join(heads)} |", "|---|" + "--:|" * 6]
    for name, found in case["summary"].items():
        cells = []
        for s in (found[phase] for phase in PHASES):
            spread = s and f"{number(s['min'])}–{number(s['max'])}"
            cells += [number(s["median"]), spread, f"{s['ratio']:.2f}" if s["ratio"] else "–"] if s else ["–"] * 3
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for phase, best in case["best_peer"].items():
        ratio = f"; mantissa / best = {best['ratio']:.2f}" if best["ratio"] else ""
        lines.append(f"- Best peer, {phase}: {best['program']}{ratio}")
    for key in MANTISSA_KEPT:
        values = [r[key] for r in case["runs"].get("mantissa", []) if isinstance(r.get(key), (int, float))]
        lines += [f"- mantissa {key}: {statistics.median(values):.3g}"] if values else []
    runs = [(name, r) for name, rows in case["runs"].items() for r in rows]
    lines += [f"- Failed: {e}" for e in sorted({f"{name}: {r['error']}" for name, r in runs if "error" in r})]
    if other := [r["other_cpu"] for _, r in runs if "other_cpu" in r]:
        lines.append(f"- Other CPU: median {statistics.median(other):.2f}, max {max(other):.2f} processors")
    return [*lines, ""]


def machine():
    """Processor and conditions of the measurement."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
    # x86 calls the line "flags", Arm "Features".
    flags = f"{found.get('flags')} {found.get('Features')}".split()
    return {
        "cpu": found.get("model name", "unknown"), "cores": os.cpu_count(), "isa": [f for f in ISA if f in flags],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "date": datetime.date.today().isoformat(),
    }


def report(args, cases, cpu):
    """Writes NAME.json and NAME.md."""
    settings = {k: getattr(args, k) for k in ("threads", "prompt", "gen", "rounds", "kv")}
    lines = [
        f"# Speed against peers, {cpu['date']}", "",
        f"{cpu['cpu']}, {cpu['cores']} cores ({', '.join(cpu['isa'])}), {cpu['memory_bytes'] / 1e9:.0f} GB; "
        f"{args.threads} threads, {args.rounds} rounds, KV cache {args.kv or 'default'}.",
        "Medians; ratio = mantissa / program, above 1 where mantissa is faster.", "",
    ]
    for case in cases:
        lines += table(case, args)
    # A suffix is appended, not replaced: a name may contain dots.
    pathlib.Path(f"{args.out}.json").write_text(json.dumps({"machine": cpu, "settings": settings, "cases": cases}, indent=1) + "\n")
    pathlib.Path(f"{args.out}.md").write_text("\n".join(lines))


def bench(args):
    """Measures every model at every depth; exit code 1 if a run failed."""
    chosen, cpu, cases, failed = programs(args), machine(), [], 0
    if not chosen:
        sys.exit("error: no program to measure; fix: give --mantissa, --llama-bench, --ik-llama-bench or --mistralrs")
    if missing := [m for m in args.model if not m.is_file()]:
        sys.exit(f"error: {missing[0]}: no such file")
    for model in args.model:
        for depth in args.depth:
            runs = {p.name: [] for p in chosen}
            for turn in range(args.rounds):
                shift = turn % len(chosen)
                for program in chosen[shift:] + chosen[:shift]:
                    if (run := quiet(program, model, depth, args)) is None:
                        continue
                    runs[program.name].append(run)
                    failed += "error" in run
                    shown = run.get("error") or ", ".join(f"{p} {number(run[p])}" for p in PHASES if run.get(p))
                    print(f"{model.name} d{depth} round {turn + 1} {program.name}: {shown}", file=sys.stderr, flush=True)
            summaries = {name: summary(rows) for name, rows in runs.items() if rows}
            case = {"model": model.name, "bytes": model.stat().st_size, "depth": depth, "summary": summaries}
            cases.append(case | {"best_peer": compare(summaries), "runs": runs})
            print("\n".join(table(cases[-1], args)), flush=True)
            report(args, cases, cpu)
    sys.exit(1 if failed else 0)


def build(args):
    """Builds llama-bench of the peers and prints the paths."""
    folder = args.build.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    if not archive.exists():
        # Not --no-binary :all:, which would also build cmake and ninja from source.
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder]
        subprocess.run([*pip, f"llama-cpp-python=={LLAMA_CPP_PYTHON}"], check=True)
    source = folder / archive.name.removesuffix(".tar.gz")
    if not source.exists():
        shutil.unpack_archive(archive, folder, filter="data")
    jobs = [("llama.cpp", source / "vendor/llama.cpp", CMAKE_LLAMA)]
    if args.ik_source:
        jobs.append(("ik_llama.cpp", args.ik_source.resolve(), CMAKE_IK))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    # Keeps the build from recording the commit of a repository around the folder.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}
    for name, source, flags in jobs:
        out = folder / f"{name}-build"
        make = ["cmake", "--build", out, "--parallel", str(args.jobs), "--target", "llama-bench"]
        for command in (["cmake", "-S", source, "-B", out, *generator, *CMAKE, *flags], make):
            subprocess.run(command, check=True, env=environment)
        print(f"{name}: {out / 'bin/llama-bench'}{vnni(out / 'bin/llama-bench')}", flush=True)


def vnni(binary):
    """Number of 512-bit VNNI instructions, which shows that a build for AVX-512 VNNI has its kernels."""
    if not shutil.which("objdump") or "avx512_vnni" not in machine()["isa"]:
        return ""
    with subprocess.Popen(["objdump", "-d", binary], stdout=subprocess.PIPE, text=True) as listing:
        return f" ({sum('vpdpbusd' in l and 'zmm' in l for l in listing.stdout)} 512-bit VNNI instructions)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", type=pathlib.Path, default=[], metavar="FILE", help="GGUF files")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of prefill [default: 512]")
    parser.add_argument("--gen", type=int, default=128, metavar="N", help="tokens of decode [default: 128]")
    parser.add_argument("--depth", nargs="+", type=int, default=[0], metavar="N", help="tokens in the KV cache before [default: 0]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of every program [default: 5]")
    parser.add_argument("--max-other", type=float, default=0.1, metavar="N", help="repeat runs with more other CPU [default: 0.1]")
    parser.add_argument("--tries", type=int, default=4, metavar="N", help="runs at most for a figure [default: 4]")
    parser.add_argument("--kv", metavar="SCHEME", help="KV cache scheme, such as f16 or q8_0 [default: each program's]")
    for name in ("mantissa", "llama-bench", "ik-llama-bench", "mistralrs"):
        parser.add_argument(f"--{name}", metavar="BINARY")
    parser.add_argument("--out", default="peers", metavar="NAME", help="write NAME.json and NAME.md [default: peers]")
    parser.add_argument("--build", type=pathlib.Path, metavar="FOLDER", help="build the peers there")
    parser.add_argument("--ik-source", type=pathlib.Path, metavar="FOLDER", help="source of ik_llama.cpp")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="parallel compile jobs [default: all cores]")
    args = parser.parse_args()
    if not args.build and not args.model:
        parser.error("give --model or --build")
    build(args) if args.build else bench(args)


if __name__ == "__main__":
    main()
