"""`ganger completion` and `ganger version`: the program itself."""

from __future__ import annotations

import click

from ganger import __version__
from ganger.cli.options import json_option, open_client


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print versions of client and master."""
    from ganger.console import print_json
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError

    try:
        with open_client() as client:
            theirs, why = client.get_cluster().version, ""
    except (ApiError, EndpointError) as error:
        # A version is asked for just when things do not work.
        theirs, why = "", str(error).partition("\n")[0]
    if as_json:
        print_json({"client": __version__, "master": theirs or None})
    else:
        print(f"client {__version__}\nmaster {theirs or f'unknown ({why})'}")


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  ganger completion bash >> ~/.bashrc
    zsh:   ganger completion zsh >> ~/.zshrc
    fish:  ganger completion fish > ~/.config/fish/completions/ganger.fish
    """
    from click.shell_completion import get_completion_class

    from ganger.cli.main import ganger

    kind = get_completion_class(shell)
    assert kind is not None, f"click completes {shell}"
    print(kind(ganger, {}, "ganger", "_GANGER_COMPLETE").source())
