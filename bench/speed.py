#!/usr/bin/env python3
"""Speed of the fast engine in parts, each of which also runs alone.

    bench/speed.py --source MODEL --model FILE.gguf --mantissa BINARY --session-bench BINARY --work FOLDER --out NAME
                   [--llama-bench BINARY] [--ik-llama-bench BINARY] [--llama-quantize BINARY] [--bf16 FILE.gguf] [PART ...]

Parts, with their time on two Zen 4 cores and a model of 1.24 B parameters:

    batch      1, 16 and 64 sequences at once                                      1 min
    prefix     a second prompt with a common beginning of 2048 tokens              1 min
    lookup     prompt lookup on edits and on prose, continuations given            2 min
    neighbour  a busy process on one of the cores                                  1 min
    schemes    NF4, NVFP4, MXFP4, FP8, int4-g128, int3-g128: share of bandwidth    4 min
    depth      4096 and 8192 tokens, KV cache f16, int8, int4; one thread          6 min, with peers 10 min
    quantize   against llama-quantize, alternating                                 4 min

--source is a folder in bf16, --bf16 the same model as GGUF, --model a quantized GGUF file with a tokenizer. Parts without their
options are left out with a note. Writes NAME.json and NAME.md after each part. Only Linux.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import peers

PARTS = ["batch", "prefix", "lookup", "neighbour", "schemes", "depth", "quantize"]
SCHEMES = ["nf4", "nvfp4", "mxfp4", "fp8-dynamic", "rtn-int4-g128", "rtn-int3-g128"]
# Name of a type for llama-quantize, and the recipe.
TYPES = {"Q4_0": "rtn-q4_0", "Q8_0": "rtn-q8_0", "Q4_K_M": "q4_k_m"}


def output(command):
    """Standard output of a command, which must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit {done.returncode}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout


def bench(args, model, *more, threads=None):
    """Report of `mantissa bench`."""
    command = [args.mantissa, "bench", model, "--threads", threads or args.threads, "--json", "--quiet", *more]
    return json.loads(output(command))


def rows(heads, values):
    """Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in values]


def percent(share):
    return f"{100 * share:.0f} %"


def batch(args):
    report = bench(args, args.model, "--prompt", 0, "--gen", args.gen, "--reps", args.reps, "--batch", "1,16,64")
    one = report["runs"][0]["tg_tokens_per_s"]
    values = [(run["batch"], f"{run['tg_tokens_per_s']:.1f}", f"{run['tg_tokens_per_s'] / one:.2f}", percent(run["tg_share_of_bandwidth"]))
              for run in report["runs"]]
    return report, rows(["sequences", "tok/s", "ratio to one", "of bandwidth"], values)


def prefix(args):
    found = json.loads(output([args.session_bench, "prefix", args.model, args.prefix, args.threads]))
    values = [(found["prefix_tokens"], percent(found["skipped_share"]), f"{found['first_token_s']:.2f}", f"{found['first_token_shared_s']:.2f}")]
    return found, rows(["common tokens", "skipped", "first token s", "first token s, shared"], values)


def lookup(args):
    found = json.loads(output([args.session_bench, "lookup", args.model, args.tasks, args.threads]))
    values = [(name, f"{of['off_tokens_per_s']:.1f}", f"{of['lookup_tokens_per_s']:.1f}", f"{of['ratio']:.2f}", f"{of['accepted']} of {of['proposed']}")
              for name, of in found.items()]
    return found, rows(["texts", "tok/s off", "tok/s with lookup", "ratio", "accepted"], values)


def spin(core):
    """Starts a process that keeps a core busy."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code])


def cpu_seconds(pid):
    """Processor time of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / peers.TICKS


def neighbour(args):
    """Speeds alone and beside a busy process, by turns. Its share is its processor time over that of all cores, during the whole run with loading."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    runs = {"alone": [], "beside": []}
    shares = []
    more = ["--prompt", args.prompt, "--gen", args.gen, "--reps", 1]
    for _ in range(args.rounds):
        runs["alone"].append(bench(args, args.model, *more))
        busy = spin(cores[-1])
        try:
            start, before = time.monotonic(), cpu_seconds(busy.pid)
            runs["beside"].append(bench(args, args.model, *more))
            shares.append((cpu_seconds(busy.pid) - before) / (time.monotonic() - start) / len(cores))
        finally:
            busy.kill()
            busy.wait()
    share = statistics.median(shares)
    median = {name: {phase: statistics.median(r[f"{phase}_tokens_per_s"] for r in of) for phase in peers.PHASES} for name, of in runs.items()}
    values = [(name, f"{median['alone'][p]:.1f}", f"{median['beside'][p]:.1f}", percent(1 - median["beside"][p] / median["alone"][p]), percent(share))
              for p, name in [("pp", "prefill"), ("tg", "decode")]]
    found = {"cores": len(cores), "share_taken": share, "median": median, "runs": runs}
    return found, rows(["work", "tok/s alone", "tok/s beside", "falls by", "share taken"], values)


def schemes(args):
    found, values = {}, []
    for recipe in SCHEMES:
        folder = args.work / recipe
        if not folder.exists():
            output([args.mantissa, "quantize", args.source, "--recipe", recipe, "--out", folder, "--verify=false", "--quiet"])
        try:
            report = bench(args, folder, "--prompt", args.prompt, "--gen", args.gen, "--reps", args.reps, "--explain")
        finally:
            if not args.keep:
                shutil.rmtree(folder)
        kernels = {row["kernel"] for row in report.pop("kernels")}
        found[recipe] = report | {"kernels": sorted(kernels)}
        values.append((recipe, f"{report['tg_tokens_per_s']:.1f}", percent(report["tg_share_of_bandwidth"]), f"{report['pp_tokens_per_s']:.0f}", percent(report["pp_share_of_peak"])))
    return found, rows(["recipe", "decode tok/s", "of bandwidth", "prefill tok/s", "of peak"], values)


def peer_rates(args, depth, threads):
    """Decode tokens/s of the peers at a depth, once each."""
    chosen = argparse.Namespace(**vars(args) | {"mantissa": None, "mistralrs": None, "kv": None, "prompt": 0, "threads": threads})
    found = {}
    for program in peers.programs(chosen):
        # The slower variants are not run at depth.
        if depth and program.name.endswith("=0"):
            continue
        found[program.name] = (peers.measure(program, args.model, depth, chosen) or {}).get("tg")
    return found


def depth(args):
    kinds = [x for kv in ("f16", "int8", "int4") for x in ("--kv", kv)]
    depths = ",".join(map(str, args.depth))
    deep = bench(args, args.model, "--prompt", 0, "--gen", args.gen, "--reps", 1, "--depth", depths, *kinds)
    single = bench(args, args.model, "--prompt", 0, "--gen", args.gen, "--reps", args.reps, threads=1)
    found = {"deep": deep, "one_thread": single, "peers": {}}
    values = [(f"{run['depth']}, {run['kv']}", f"{run['tg_tokens_per_s']:.1f}", percent(run["tg_share_of_bandwidth"]), "", "") for run in deep["runs"]]
    values.append(("0, one thread", f"{single['tg_tokens_per_s']:.1f}", percent(single["tg_share_of_bandwidth"]), "", ""))
    for i, (at, threads) in enumerate([(at, args.threads) for at in args.depth] + [(0, 1)]):
        rates = peer_rates(args, at, threads)
        found["peers"][f"depth {at}, {threads} threads"] = rates
        best = max(((rate, name) for name, rate in rates.items() if rate), default=None)
        if best:
            own = single["tg_tokens_per_s"] if threads == 1 and at == 0 else deep["runs"][i]["tg_tokens_per_s"]
            row = next(j for j, v in enumerate(values) if v[0] == ("0, one thread" if at == 0 else f"{at}, f16"))
            values[row] = values[row][:3] + (f"{best[0]:.1f} ({best[1]})", f"{own / best[0]:.2f}")
    return found, rows(["depth, KV cache", "decode tok/s", "of bandwidth", "best peer", "ratio"], values)


def quantize(args):
    found, values = {}, []
    out = args.work / "quantized.gguf"
    for name, recipe in TYPES.items():
        own = [args.mantissa, "quantize", args.bf16, "--recipe", recipe, "--format", "gguf", "--out", out, "--threads", args.threads, "--verify=false", "--quiet", "--overwrite"]
        peer = [args.llama_quantize, args.bf16, out, name, args.threads]
        times = {"mantissa": [], "llama-quantize": []}
        for _ in range(args.rounds):
            for who, command in [("mantissa", own), ("llama-quantize", peer)]:
                start = time.monotonic()
                output(command)
                times[who].append(time.monotonic() - start)
                for file in out.parent.glob(out.name + "*"):
                    file.unlink()
        median = {who: statistics.median(of) for who, of in times.items()}
        found[name] = times
        values.append((name, f"{median['mantissa']:.2f}", f"{median['llama-quantize']:.2f}", f"{median['llama-quantize'] / median['mantissa']:.2f}"))
    return found, rows(["type", "mantissa s", "llama-quantize s", "ratio"], values)


NEEDS = {"batch": ["model"], "prefix": ["model", "session_bench"], "lookup": ["model", "session_bench"], "neighbour": ["model"],
         "schemes": ["source"], "depth": ["model"], "quantize": ["bf16", "llama_quantize"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", metavar="PART", help=f"parts to run, of {', '.join(PARTS)} [default: all]")
    parser.add_argument("--source", type=pathlib.Path, metavar="FOLDER", help="model in bf16")
    parser.add_argument("--bf16", type=pathlib.Path, metavar="FILE", help="the same model as a GGUF file in bf16")
    parser.add_argument("--model", type=pathlib.Path, metavar="FILE", help="a quantized GGUF file")
    for name in ("mantissa", "session-bench", "llama-bench", "ik-llama-bench", "llama-quantize"):
        parser.add_argument(f"--{name}", metavar="BINARY", required=name == "mantissa")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("speed-work"), metavar="FOLDER", help="for models made on the way")
    parser.add_argument("--keep", action="store_true", help="keep them")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of alternating measurements [default: 3]")
    parser.add_argument("--reps", type=int, default=3, metavar="N", help="repetitions within a run [default: 3]")
    parser.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of prefill [default: 256]")
    parser.add_argument("--gen", type=int, default=24, metavar="N", help="tokens of decode [default: 24]")
    parser.add_argument("--prefix", type=int, default=2048, metavar="N", help="tokens of the common beginning [default: 2048]")
    parser.add_argument("--tasks", type=int, default=6, metavar="N", help="tasks of prompt lookup of each kind [default: 6]")
    parser.add_argument("--depth", nargs="+", type=int, default=[4096, 8192], metavar="N")
    parser.add_argument("--out", default="speed", metavar="NAME", help="write NAME.json and NAME.md [default: speed]")
    args = parser.parse_intermixed_args()
    if unknown := [part for part in args.part if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; expected {', '.join(PARTS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    cpu, found, failed = peers.machine(), {}, 0
    lines = [f"# Speed of the fast engine, {cpu['date']}", "", f"{cpu['cpu']}, {cpu['cores']} cores ({', '.join(cpu['isa'])}), {args.threads} threads.", ""]
    for part in args.part or PARTS:
        if missing := [option for option in NEEDS[part] if not getattr(args, option)]:
            print(f"{part}: left out without --{missing[0].replace('_', '-')}", file=sys.stderr)
            continue
        start, busy, own = time.monotonic(), peers.busy_seconds(), peers.own_seconds()
        try:
            figures, table = globals()[part](args)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            figures, table, failed = {"error": str(error)}, [f"Failed: {error}"], 1
        wall = time.monotonic() - start
        others = max(0.0, peers.busy_seconds() - busy - (peers.own_seconds() - own)) / wall
        found[part] = {"seconds": round(wall, 1), "other_cpu": round(others, 3), "figures": figures}
        text = [f"## {part}", "", *table, "", f"{wall:.0f} s; other CPU {others:.2f} processors.", ""]
        print("\n".join(text), flush=True)
        lines += text
        pathlib.Path(f"{args.out}.json").write_text(json.dumps({"machine": cpu, "threads": args.threads, "parts": found}, indent=1) + "\n")
        pathlib.Path(f"{args.out}.md").write_text("\n".join(lines))
    sys.exit(failed)


if __name__ == "__main__":
    main()
