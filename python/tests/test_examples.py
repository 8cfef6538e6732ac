"""The examples of all docstrings run, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import mantissa

OPTIONAL = ("__main__", "transformers", "lm_eval")
"""Modules that need a package that is not installed, or that run."""

MODULES = [module.name for module in pkgutil.iter_modules(mantissa.__path__) if module.name not in (*OPTIONAL, "_core")]


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"mantissa.{name}" if name else "mantissa")
    assert doctest.testmod(module, verbose=False).failed == 0


def test_every_public_function_has_an_example() -> None:
    for name in mantissa.__all__:
        value = getattr(mantissa, name)
        if callable(value) and not isinstance(value, type):
            assert ">>>" in (value.__doc__ or ""), name
    for name, value in vars(mantissa.Model).items():
        if callable(value) and not name.startswith("_"):
            assert ">>>" in (value.__doc__ or ""), name
