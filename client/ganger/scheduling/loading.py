"""Find the class that "module:Class" names."""

from __future__ import annotations

from importlib import import_module

from ganger.scheduling.base import JobScheduler


class LoadError(Exception):
    """The class cannot be had; the message says why."""


def load_scheduler(text: str) -> JobScheduler:
    """An instance of the class. Raises LoadError. Runs the user's code: call it in the user's process only."""
    module_name, colon, class_name = text.partition(":")
    if not module_name or not colon or not class_name:
        raise LoadError(f"{text!r} is not MODULE:CLASS, for example my_schedulers:NearTheData")
    try:
        found = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise LoadError(f"cannot import {module_name}: {error}") from error
    except AttributeError as error:
        raise LoadError(f"module {module_name} has no class {class_name}") from error
    if not isinstance(found, type) or not issubclass(found, JobScheduler):
        raise LoadError(f"{text} is not a subclass of ganger.scheduling.JobScheduler")
    return found()
