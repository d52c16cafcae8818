"""Models of users: `--model package.module:function` calls a function with the number of classes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from stoker.errors import InputError, MissingError

M = TypeVar("M")


def find_function(home: str, name: str) -> Callable[..., object]:
    """Import the function that builds a model."""
    function = getattr(import_package(home, f"{home}:{name}"), name, None)
    if not callable(function):
        raise InputError(f"module {home!r} has no function {name!r}", where=f"--model {home}:{name}")
    return cast(Callable[..., object], function)


def import_package(module: str, model: str) -> Any:
    """Import the package of a model; raise MissingError if it is not installed or broken."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise MissingError(
            f"Python package {package!r} is not installed",
            where=f"--model {model}",
            hint=f"run: pip install {package}",
        ) from error
    except Exception as error:  # installed but broken, as torchvision built for another torch
        raise MissingError(f"cannot import {module!r}: {error}", where=f"--model {model}") from error


def call_function(function: Callable[..., object], name: str, num_classes: int, kind: type[M], kind_name: str) -> M:
    """Build a model with a function; raise InputError if it does not take `num_classes` or returns something else."""
    try:
        inspect.signature(function).bind(num_classes=num_classes)
    except TypeError as error:
        raise InputError(
            f"call with num_classes={num_classes} failed: {error}",
            where=f"--model {name}",
            hint="the function must take num_classes and return the model",
        ) from error
    except ValueError:
        pass  # a function without an inspectable signature
    model = function(num_classes=num_classes)
    if not isinstance(model, kind):
        raise InputError(f"returned {type(model).__name__}, expected {kind_name}", where=f"--model {name}")
    return model
