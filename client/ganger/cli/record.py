"""`ganger record`: lets the master write down what it decides, for `ganger replay`."""

from __future__ import annotations

from pathlib import Path

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, Within, print_json
from ganger.units import format_memory, parse_memory

_MOST_S = 3600


@click.command()
@click.option(
    "--seconds", "-s", type=Within(0, _MOST_S, min_open=True), default=60.0, show_default=True,
    help="For how long; Ctrl-C ends it early, and what was recorded is kept.",
)  # fmt: skip
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Copy it to this file, too.")
@click.option("--most", metavar="SIZE", help="Largest file, such as 1G; default 256M.")
@click.option("--with-environment", is_flag=True, help="With variables and arguments of jobs, which may be secret.")
@json_option
def record(seconds: float, out: Path | None, most: str | None, with_environment: bool, as_json: bool) -> None:
    """Write down every decision of the master for some time, from a snapshot of its state on.

    The file is in the master's state directory, under captures/. `ganger replay FILE` makes the decisions once more
    and prints the reasons.
    """
    from ganger.wire import times

    try:
        most_bytes = parse_memory(most) if most is not None else 0
    except ValueError as error:
        raise click.UsageError(f"--most: {error}") from error
    if most is not None and not most_bytes:
        raise click.UsageError("--most: nothing can be written into a file of no bytes")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        # Found out now, not when the time is over.
        raise CommandError(f"cannot copy to {out}: it is a directory, or stands in none that there is")
    if out is not None and out.is_file():
        raise CommandError(f"cannot copy to {out}: there is such a file already; name another, or remove it")
    with open_client() as client:
        try:
            found = client.record_decisions(seconds, most_bytes=most_bytes, with_environment=with_environment)
        except KeyboardInterrupt:
            not_copied = "" if out is None else ", and was not copied"
            click.echo(
                f"ended early: the file is in the master's state directory, under captures/{not_copied}", err=True
            )
            raise
    path = Path(found.path)
    if out is not None:
        path = _copied(path, out)
    if as_json:
        print_json(found)
        return
    took, size = times.seconds(found.duration), format_memory(found.size_bytes)
    print(path)
    click.echo(f"{found.commands:,} commands in {took:.1f} s, {size}: {found.end_reason}", err=True)


def _copied(recorded: Path, out: Path) -> Path:
    """Copy a recording to `out`, readable by its owner only, and return `out`. Raises CommandError."""
    import os
    import shutil

    try:
        with recorded.open("rb") as source:
            descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as target:
                shutil.copyfileobj(source, target)
    except OSError as error:
        text = f"cannot copy {recorded} to {out}: {error.strerror}; it is on the master's machine"
        raise CommandError(text) from error
    return out
