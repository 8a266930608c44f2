"""What a command answers whose code is in the repository and in no installed package: benchmarks, experiments,
the demo."""

from __future__ import annotations

import click

# Packages that an editable install of a checkout puts on the path.
_PACKAGES = ("benchmarks", "examples", "experiments")


def is_of_a_checkout(error: ModuleNotFoundError) -> bool:
    """Return whether a module is lacking because there is no checkout."""
    return error.name is not None and error.name.partition(".")[0] in _PACKAGES


def needs_checkout(command: str) -> click.ClickException:
    """Return the error of a command that cannot run as installed."""
    return click.ClickException(
        f"`ganger {command}` needs a checkout of Ganger's repository: run `make setup` there, or"
        " `pip install --editable .`"
    )


def unavailable(command: str) -> click.Command:
    """Return a command of that name which takes any arguments and fails with `needs_checkout`."""

    def refuse(arguments: tuple[str, ...]) -> None:
        raise needs_checkout(command)

    anything = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(
        command, params=[anything], callback=refuse, short_help="Needs a checkout.", context_settings=takes_all
    )
