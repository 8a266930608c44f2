"""`ganger completion`: the script that teaches a shell our commands, jobs and nodes."""

from __future__ import annotations

import click


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
