"""Precision of language models: quantize, measure, convert, train, run.

>>> import mantissa
>>> report = mantissa.inspect("demo")
>>> report.parameters
1328512

``"demo"`` is a small model inside the package, so that every example runs as it stands.
"""

from __future__ import annotations

import atexit as _atexit
import os as _os

from . import _core
from ._commands import (
    compare,
    convert,
    diagnose,
    distill,
    evaluate,
    explain,
    finetune,
    fit,
    inspect,
    lint,
    plan,
    quantize,
    train,
    verify,
)
from ._model import Completion, Model, load
from ._report import Report
from ._run import Run
from ._server import Server, program as _program
from ._tensor import QuantizedTensor, Tensor, quantize_tensor
from .errors import EnvironmentError_, GateError, InputError, InternalError, Interrupted, MantissaError

__version__: str = _core.__version__

__all__ = [
    "Completion",
    "EnvironmentError_",
    "GateError",
    "InputError",
    "InternalError",
    "Interrupted",
    "MantissaError",
    "Model",
    "QuantizedTensor",
    "Report",
    "Run",
    "Server",
    "Tensor",
    "compare",
    "convert",
    "diagnose",
    "distill",
    "evaluate",
    "explain",
    "finetune",
    "fit",
    "inspect",
    "lint",
    "load",
    "plan",
    "quantize",
    "quantize_tensor",
    "recipes",
    "schemes",
    "train",
    "verify",
]

_core.starts_with(_program())
_atexit.register(_core.remove_embedded)
# Before that: what was interrupted saves its work. Another Ctrl-C ends the wait.
_atexit.register(_core.settle)
if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_core.forked)


def recipes() -> list[str]:
    """Return the names of recipes; any METHOD-SCHEME is one as well.

    >>> import mantissa
    >>> "q4_k_m" in mantissa.recipes()
    True
    """
    return _core.recipes()


def schemes() -> list[str]:
    """Return the names of number formats, one for each family.

    >>> import mantissa
    >>> "nvfp4" in mantissa.schemes()
    True
    """
    return _core.schemes()
