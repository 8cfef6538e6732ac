"""Commands as functions: each has the command's flags as arguments, and its JSON report as result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._arguments import PathLike, Samples, called, files_of, kept_file, settings_file
from ._progress import Progress, shown
from ._report import Report
from ._run import Run, StepReader

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "compare", "convert", "diagnose", "distill", "evaluate", "explain", "finetune", "fit", "inspect", "lint", "plan",
    "quantize", "train", "verify",
]


def _calibrated(calibration: Samples | None) -> dict[str, Any]:
    texts, tokens = files_of("calibration", calibration)
    return {"calibration": texts, "calibration_tokens": tokens}


def _measured(text: Samples | None) -> dict[str, Any]:
    texts, tokens = files_of("text", text)
    return {"text": texts, "tokens": tokens}


def quantize(
    model: PathLike,
    recipe: PathLike = "auto",
    *,
    out: PathLike | None = None,
    for_: str | Sequence[str] | None = None,
    bits: int | None = None,
    format: str | Sequence[str] | None = None,
    calibration: Samples | None = None,
    samples: int | None = None,
    length: int | None = None,
    text: Samples | None = None,
    max_kl: float | None = None,
    keep: Sequence[str] = (),
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Report:
    """Quantize a model by a recipe, verify the output, and put it in place.

    ``recipe="auto"`` chooses a measured recipe for the engine ``for_`` (such as ``"vllm"``) and the ``bits``. ``calibration``
    is a file, ``"default"`` (the built-in text), an iterable of texts or of dicts with ``"text"``, or lists of token ids;
    ``text`` likewise is what quality is measured on. ``max_kl`` (nats/token) is a gate: above it, :class:`GateError` is raised
    and nothing is put in place. A call that was interrupted resumes when it is made again. ``options`` are further flags of
    ``mantissa quantize``, such as ``head="int8"``.

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = mantissa.quantize("demo", "rtn-int4-g32", out=folder + "/q")
    >>> round(report.linear_bits_per_weight, 2), report.verification["ok"]
    (4.5, True)
    """
    recipe = os.fspath(recipe)
    if recipe == "auto" and for_ is None:
        # The choice needs an engine; this one loads whatever is chosen.
        for_ = "mantissa"
    flags = {
        "recipe": None if recipe == "auto" else recipe, "out": out, "for": for_, "bits": bits, "format": format,
        **_calibrated(calibration), "samples": samples, "length": length, **_measured(text), "max_kl": max_kl,
        "keep": keep, "seed": seed, "threads": threads, "memory": memory, "strict": strict, "overwrite": overwrite,
    }
    return called("quantize", [model], {**flags, **options}, progress)


def fit(
    model: PathLike,
    budget: str | float,
    *,
    out: PathLike,
    method: str | Sequence[str] | None = None,
    schemes: Sequence[str] = (),
    for_: str | Sequence[str] | None = None,
    calibration: Samples | None = None,
    text: Samples | None = None,
    max_kl: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Report:
    """Choose a scheme for each layer so that the loss is least within a budget, and quantize so.

    ``budget`` is a size (``"6GB"``) or bits per weight (``"4.5bpw"``, or the number 4.5). ``options`` are further flags of
    ``mantissa fit``.

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = mantissa.fit("demo", 5, out=folder + "/q", schemes=["int4-g32", "int8-g32"], windows=2, context=64)
    >>> report.linear_bits_per_weight <= 5
    True
    """
    size = budget if isinstance(budget, str) else f"{budget}bpw"
    flags = {
        "budget": size, "out": out, "method": method, "schemes": ",".join(schemes) or None, "for": for_,
        **_calibrated(calibration), **_measured(text if text is not None else "default"), "max_kl": max_kl,
        "seed": seed, "threads": threads, "memory": memory, "strict": strict, "overwrite": overwrite,
    }
    return called("fit", [model], {**flags, **options}, progress)


def compare(
    model: PathLike,
    recipes: Sequence[str] = (),
    *,
    outputs: Sequence[PathLike] = (),
    text: Samples | None = None,
    calibration: Samples | None = None,
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Report:
    """Quantize by several recipes and measure the results, and finished ``outputs``, in one table.

    Differences are paired by window. ``options`` are further flags of ``mantissa compare``, such as ``html="page.html"``.

    >>> import mantissa
    >>> report = mantissa.compare("demo", ["rtn-int4-g32", "rtn-int8-channel"], context=64, limit=256)
    >>> [row["name"] for row in report.rows]
    ['rtn-int4-g32', 'rtn-int8-channel']
    """
    flags = {
        "recipe": [recipes] if isinstance(recipes, str) else recipes, **_measured(text), **_calibrated(calibration),
        "seed": seed, "threads": threads, "memory": memory, "strict": strict, "overwrite": overwrite,
    }
    return called("compare", [model, *outputs], {**flags, **options}, progress)


def convert(
    model: PathLike,
    format: str,
    *,
    out: PathLike,
    requantize: str | None = None,
    text: Samples | None = None,
    max_kl: float | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Report:
    """Store the codes and scales of a quantized model in another format, exactly; ``requantize`` rounds again to a scheme.

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = mantissa.quantize("demo", "rtn-int4-g32", out=folder + "/q")
    ...     report = mantissa.convert(folder + "/q", "gptq", out=folder + "/c")
    >>> report.container
    'gptq'
    """
    flags = {
        "format": format, "out": out, "requantize": requantize, **_measured(text), "max_kl": max_kl, "threads": threads,
        "memory": memory, "strict": strict, "overwrite": overwrite,
    }
    return called("convert", [model], {**flags, **options}, progress)


def evaluate(
    model: PathLike,
    *,
    reference: PathLike | None = None,
    text: Samples | None = None,
    context: int | None = None,
    tasks: Sequence[PathLike] = (),
    kv: str | None = None,
    adapter: PathLike | None = None,
    engine: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    **options: Any,
) -> Report:
    """Measure perplexity, and with ``reference`` the KL divergence from it, each with its standard error; or tasks.

    ``text`` is a file, ``"default"``, texts, or windows of token ids. ``options`` are further flags of ``mantissa eval``.

    >>> import mantissa
    >>> report = mantissa.evaluate("demo", reference="demo", text="default", context=64, limit=256)
    >>> report.kl
    0.0
    """
    flags = {
        "reference": reference, **_measured(text), "context": context, "task": tasks, "kv": kv, "adapter": adapter,
        "engine": engine, "seed": seed, "threads": threads, "memory": memory, "strict": strict,
    }
    return called("eval", [model], {**flags, **options}, progress)


def verify(
    model: PathLike,
    *,
    reference: PathLike | None = None,
    text: Samples | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Report:
    """Check a model with a reader that shares no code with the writer. A fault raises :class:`GateError`.

    >>> import mantissa
    >>> mantissa.verify("demo").ok
    True
    """
    flags = {"reference": reference, **_measured(text), "threads": threads, "memory": memory}
    return called("verify", [model], {**flags, **options}, progress)


def lint(
    model: PathLike,
    *,
    engine: str | Sequence[str] = (),
    reference: PathLike | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Report:
    """Check that engines will load a model and compute correctly. One that refuses it raises :class:`GateError`.

    >>> import mantissa
    >>> mantissa.lint("demo", engine="vllm").ok
    True
    """
    flags = {"for": engine, "reference": reference, "threads": threads, "memory": memory}
    return called("lint", [model], {**flags, **options}, progress)


def diagnose(
    model: PathLike,
    *,
    reference: PathLike | None = None,
    text: Samples | None = None,
    kv: Sequence[str] = (),
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Report:
    """Find what makes a quantized model worse than its ``reference``: the layers, the cache, or the evaluation itself.

    >>> import mantissa
    >>> mantissa.diagnose("demo", text="default", context=64).findings
    []
    """
    flags = {"reference": reference, **_measured(text), "kv": kv, "threads": threads, "memory": memory}
    return called("diagnose", [model], {**flags, **options}, progress)


def inspect(
    model: PathLike,
    *,
    stats: bool = False,
    threads: int | None = None,
    memory: str | int | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Report:
    """Describe a checkpoint: architecture, schemes, sizes, tensors; with ``stats`` the values too.

    >>> import mantissa
    >>> mantissa.inspect("demo").bits_per_weight > 15
    True
    """
    flags = {"stats": stats, "threads": threads, "memory": memory}
    return called("inspect", [model], {**flags, **options}, progress)


def plan(
    model_or_parameters: PathLike | int,
    *,
    hardware: str | None = None,
    context: int | str | None = None,
    batch: int | None = None,
    for_: str | None = None,
    bits: float | None = None,
    max_kl: float | None = None,
    memory: str | int | None = None,
    **options: Any,
) -> Report:
    """Predict which precision to choose, whether it loads, and how fast it can be, for a model or a size such as ``"32B"``.

    A number is the number of parameters. ``options`` are further flags of ``mantissa plan``, such as ``devices=2``.

    >>> import mantissa
    >>> report = mantissa.plan("8B", hardware="rtx4090", context="8k")
    >>> report.predicted, report.hardware["name"]
    (True, 'rtx4090')
    """
    flags: dict[str, Any] = {
        "hardware": hardware, "context": context, "batch": batch, "for": for_, "bits": bits, "max_kl": max_kl,
        "memory": memory,
    }
    return called("plan", _subject(model_or_parameters, flags), {**flags, **options})


def explain(
    topic: str | float | None = None,
    model_or_parameters: PathLike | int | None = None,
    *,
    hardware: str | None = None,
    context: int | str | None = None,
    batch: int | None = None,
    **options: Any,
) -> Report:
    """Answer a standing question with the figures of a model and hardware, or show a number as formats store it.

    Without a topic, the report lists them. ``options`` are further flags of ``mantissa explain``, such as ``as_=["nvfp4"]``.

    >>> import mantissa
    >>> mantissa.explain("w4a16", "8B", hardware="h100").hardware
    'H100 SXM'
    """
    flags: dict[str, Any] = {"hardware": hardware, "context": context, "batch": batch}
    subject = [] if model_or_parameters is None else _subject(model_or_parameters, flags)
    return called("explain", [*([] if topic is None else [str(topic)]), *subject], {**flags, **options})


def _subject(model_or_parameters: PathLike | int, flags: dict[str, Any]) -> list[PathLike]:
    """Return the model as a list, or put the number of parameters into the flags: what is no path and begins with a digit."""
    if isinstance(model_or_parameters, int):
        flags["params"] = model_or_parameters
        return []
    if isinstance(model_or_parameters, str) and model_or_parameters[:1].isdigit() and not os.path.exists(model_or_parameters):
        flags["params"] = model_or_parameters
        return []
    return [model_or_parameters]


OnStep = Callable[[dict[str, Any]], object]
"""Function of a step's row of the log. An exception in it stops the run, which saves a checkpoint."""


def _trained(
    command: str,
    positional: Sequence[PathLike],
    flags: Mapping[str, Any],
    run: Path | None,
    on_step: OnStep | None,
    progress: Progress | bool | None,
) -> Run:
    call = shown(progress)
    steps = None if on_step is None or run is None else StepReader(run, on_step, call)
    report = called(command, positional, flags, steps or call)
    if steps is not None:
        steps.read()
    return Run(dict(report))


def train(
    settings: PathLike | Mapping[str, Any],
    *,
    data: Sequence[PathLike] = (),
    set: Mapping[str, Any] | None = None,
    resume: bool = False,
    restart: bool = False,
    threads: int | None = None,
    memory: str | int | None = None,
    on_step: OnStep | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Run:
    """Train a model from settings: a TOML file, a mapping of the same shape (paths relative to the working folder), or the
    name of a size (``"small"``, ``"8m"``, ``"60m"``) with texts as ``data``.

    ``set`` changes settings (``{"optimizer.lr": 3e-4}``). ``on_step`` gets the log's row of each step. A run that was
    interrupted resumes bit-exactly when the call is made again with ``resume=True``. ``Run.history`` has the log's columns.

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(folder + "/text.txt", "w") as file:
    ...         _ = file.write("Once upon a time there was a dog. " * 50)
    ...     changes = {"out": folder + "/run", "schedule.steps": 3, "data.length": 16}
    ...     run = mantissa.train("small", data=[folder + "/text.txt"], set=changes)
    ...     print(len(run.history["loss"]))
    3
    """
    import json

    if data:
        size = called("train", [], {"init": settings, "data": [os.path.abspath(one) for one in data]})
        file = kept_file(size["toml"], ".toml")
        set = {**(set or {}), "out": os.path.abspath((set or {}).get("out", f"runs/{settings}"))}
    else:
        file = settings_file(settings)
    changes = [f"{name}={json.dumps(value, ensure_ascii=False, default=os.fspath)}" for name, value in (set or {}).items()]
    flags = {
        "set": changes, "resume": resume, "restart": restart, "threads": threads, "memory": memory, "strict": strict,
        "overwrite": overwrite,
    }
    run = _run_folder(settings, file, set)
    return _trained("train", [file], {**flags, **options}, run, on_step, progress)


def _run_folder(settings: PathLike | Mapping[str, Any], file: str, changes: Mapping[str, Any] | None) -> Path | None:
    """Return the folder of a run, as far as it is known before it begins."""
    from pathlib import Path

    out: Any = (changes or {}).get("out")
    if out is None and isinstance(settings, Mapping):
        out = settings.get("out")
    if out is None:
        lines = Path(file).read_text(encoding="utf-8").splitlines() if os.path.exists(file) else []
        words = (line.split("=", 1) for line in lines if line.startswith("out"))
        out = next((value.split("#")[0].strip().strip("\"'") for name, value in words if name.strip() == "out"), None)
    return None if out is None else Path(os.path.dirname(os.path.abspath(file)), os.fspath(out))


def finetune(
    model: PathLike,
    data: Samples | Sequence[PathLike],
    *,
    out: PathLike,
    adapter: str | None = None,
    rank: int | None = None,
    lr: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    on_step: OnStep | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Run:
    """Fine-tune a model, dense or quantized, with QLoRA unless ``adapter`` names ``"lora"`` or ``"none"`` (all weights).

    ``data`` is a file, texts, or dicts as JSONL files have them. ``options`` are further flags of ``mantissa finetune``.

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = mantissa.finetune("demo", ["Once upon a time there was a dog."] * 8, out=folder + "/run", steps=2, length=16)
    ...     print(run.history["step"])
    [1, 2]
    """
    from pathlib import Path

    flags = {
        "data": _data(data), "out": out, "adapter": adapter, "rank": rank, "lr": lr, "epochs": epochs, "steps": steps,
        "resume": resume, "restart": restart, "seed": seed, "threads": threads, "memory": memory, "strict": strict,
        "overwrite": overwrite,
    }
    return _trained("finetune", [model], {**flags, **options}, Path(out), on_step, progress)


def distill(
    teacher: PathLike,
    student: PathLike,
    data: Samples | Sequence[PathLike],
    *,
    out: PathLike,
    scheme: str | None = None,
    weight: float | None = None,
    temperature: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    seed: int | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    on_step: OnStep | None = None,
    progress: Progress | bool | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Run:
    """Train a model towards the predictions of another; with ``scheme`` for quantized weights (QAT).

    >>> import mantissa, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = ["Once upon a time there was a dog."] * 8
    ...     run = mantissa.distill("demo", "demo", text, out=folder + "/run", scheme="int4-g32", steps=2, length=16)
    ...     print(run.history["step"])
    [1, 2]
    """
    from pathlib import Path

    flags = {
        "data": _data(data), "out": out, "scheme": scheme, "weight": weight, "temperature": temperature, "steps": steps,
        "resume": resume, "restart": restart, "seed": seed, "threads": threads, "memory": memory, "strict": strict,
        "overwrite": overwrite,
    }
    return _trained("distill", [teacher, student], {**flags, **options}, Path(out), on_step, progress)


def _data(data: Samples | Sequence[PathLike]) -> list[str]:
    """Return the files to train on; rows become one, each with all its fields."""
    import json

    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)]
    rows = list(data)
    if rows and all(isinstance(row, os.PathLike) or isinstance(row, str) and os.path.isfile(row) for row in rows):
        return [os.fspath(row) for row in rows]
    lines: Iterable[str] = (json.dumps({"text": row} if isinstance(row, str) else dict(row)) + "\n" for row in rows)
    return [kept_file("".join(lines), ".jsonl")]
