"""`ganger`: finds the command, runs it, and turns what goes wrong into a sentence and an exit code.

Help and completion must answer at once, so this module imports click and nothing else, and a command's module only when
the command is called. Programs add theirs through the entry-point group "ganger.commands".
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

# name -> (module, attribute, one line of help); the order is that of a first hour with Ganger.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("ganger.cli.up", "up", "Start a cluster on this machine."),
    "down": ("ganger.cli.up", "down", "Stop the cluster that `ganger up --detach` started."),
    "submit": ("ganger.cli.submit", "submit", "Submit a job."),
    "queue": ("ganger.cli.show", "queue", "List jobs."),
    "show": ("ganger.cli.show", "show", "Show all that is known of jobs."),
    "why": ("ganger.cli.show", "why", "Print why a job waits, and when it may start."),
    "profile": ("ganger.cli.show", "profile", "Show the measured rates of a job by CPU cores."),
    "plot": ("ganger.cli.metric_plot", "plot", "Draw what jobs have logged, by step, and list their epochs."),
    "export": ("ganger.cli.metric_plot", "export", "Write what jobs have logged as CSV or for TensorBoard."),
    "logs": ("ganger.cli.logs", "logs", "Print what a job wrote."),
    "update": ("ganger.cli.submit", "update", "Change the request of a job: priority, time limit, name and wishes."),
    "suspend": ("ganger.cli.job_orders", "suspend", "Stop jobs between two mini-batches, keeping their state."),
    "resume": ("ganger.cli.job_orders", "resume", "Let suspended jobs continue."),
    "move": ("ganger.cli.job_orders", "move", "Move running jobs to other nodes without losing a step."),
    "resize": ("ganger.cli.job_orders", "resize", "Let an elastic job continue with another number of GPUs."),
    "retune": ("ganger.cli.job_orders", "retune", "Give a running job other numbers of cores."),
    "repin": ("ganger.cli.job_orders", "repin", "Move a running job to other cores of the same number."),
    "cancel": ("ganger.cli.job_orders", "cancel", "End jobs for good."),
    "wait": ("ganger.cli.job_orders", "wait", "Wait until jobs have ended."),
    "nodes": ("ganger.cli.nodes", "nodes", "List nodes; drain, cordon, uncordon them, declare one lost, or remove it."),
    "drain": ("ganger.cli.nodes", "drain", "Move all jobs off a node and give it no new ones."),
    "cordon": ("ganger.cli.nodes", "cordon", "Give a node no new jobs."),
    "uncordon": ("ganger.cli.nodes", "uncordon", "Undo drain and cordon."),
    "lost": ("ganger.cli.nodes", "lost", "Vouch that a node is down."),
    "partitions": ("ganger.cli.partitions", "partitions", "List partitions, with what is free and their limits."),
    "reserve": ("ganger.cli.reserve", "reserve", "Keep nodes for users or for maintenance, for a time."),
    "usage": ("ganger.cli.usage", "usage", "Show what users and teams have used, and their shares."),
    "report": ("ganger.cli.usage", "report", "Show how jobs fared: GPU-hours, waiting, deadlines, by user."),
    "top": ("ganger.cli.top", "top", "Watch nodes and jobs, live."),
    "history": ("ganger.cli.history", "history", "Print what happened to a job, and why."),
    "events": ("ganger.cli.history", "events", "List what happened, event by event."),
    "cluster": ("ganger.cli.cluster", "cluster", "Make this machine a master, others its nodes, by ssh."),
    "unit": ("ganger.cli.cluster", "unit", "Print a systemd unit of master or daemon."),
    "doctor": ("ganger.cli.diagnosis", "doctor", "Check this machine and the cluster, and say what to mend."),
    "support-bundle": ("ganger.cli.diagnosis", "support_bundle", "Write what helps others to help, in one file."),
    "record": ("ganger.cli.administration", "record", "Write down every decision of the master for some time."),
    "certs": ("ganger.cli.administration", "certs", "Make certificates for a cluster of several machines."),
    "tokens": ("ganger.cli.administration", "tokens", "Access tokens of people, in place of certificates."),
    "demo": ("ganger.cli.checkout", "demo", "Show real jobs being paused, moved and re-pinned, with proof."),
    "bench": ("ganger.cli.checkout", "bench", "Run a benchmark."),
    "completion": ("ganger.cli.main", "completion", "Print the completion script of a shell."),
    "version": ("ganger.cli.main", "version", "Print versions of client, master and daemons."),
}
# Help for the commands of our own programs, so that --help imports none of them.
_ADDED_HELP = {
    "master": "Run the master.",
    "daemon": "Run the daemon of this node.",
    "scheduler": "Run job schedulers.",
    "planner": "Run the planner.",
    "reproduce": "Run the papers' experiments again.",
    "simulate": "Replay a trace in virtual time.",
    "compare": "Replay a trace under several policies, side by side.",
    "replay": "Make the decisions of a recording again, and print the reasons.",
}
ENTRY_POINTS = "ganger.commands"
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


class _ClosedPipe(Exception):  # noqa: N818 - a reader that closes the pipe is no error
    """Carries a BrokenPipeError past click, which would end with 1: the code of a job that failed."""


class _Commands(click.Group):
    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as error:
            raise _ClosedPipe from error
        except click.NoSuchOption as error:
            raise _unknown_option(error) from error

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            raise _ClosedPipe from error
        except ModuleNotFoundError as error:
            from ganger.cli.checkout import lacking

            raise lacking(context.invoked_subcommand or "", error) from error
        except click.NoSuchOption as error:
            raise _unknown_option(error) from error
        except (click.BadParameter, click.BadOptionUsage) as error:
            from ganger.cli.slurm import with_letter_hint

            raise with_letter_hint(context.invoked_subcommand or "", error) from error

    def list_commands(self, context: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(set(_added()) - set(COMMANDS))]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            # Importing makes objects that stay; looking through them again and again takes a tenth of a command's time.
            gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
            module, attribute, _ = COMMANDS[name]
            command = getattr(import_module(module), attribute)
        elif name in (added := _added()):
            # The program's own name for it is "module:attribute", as everywhere in packaging.
            module, _, attribute = added[name].partition(":")
            try:
                command = getattr(import_module(module), attribute)
            except ModuleNotFoundError as error:
                from ganger.cli.checkout import unavailable

                command = unavailable(name, error)
        else:
            return None
        assert isinstance(command, click.Command), f"{name} is not a click command"
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-") and name not in _added():
            raise click.UsageError(f"there is no command {name!r}: {self._instead_of(name, context)}", context)
        return super().resolve_command(context, arguments)

    def _instead_of(self, name: str, context: click.Context) -> str:
        """Return what to type in place of an unknown command."""
        from difflib import get_close_matches

        from ganger.cli import slurm

        if found := slurm.COMMANDS.get(name):
            return f"for that there is {found}"
        near = get_close_matches(name, self.list_commands(context), 1)
        return f"did you mean `ganger {near[0]}`?" if near else "`ganger --help` lists them"

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every command for its help.
        rows = [
            (name, COMMANDS[name][2] if name in COMMANDS else _ADDED_HELP.get(name, ""))
            for name in self.list_commands(context)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _unknown_option(error: click.NoSuchOption) -> click.UsageError:
    """Return the error of an option that a command has not, with what it has in its place."""
    from ganger.cli.slurm import unknown_option

    command = error.ctx.command_path.partition(" ")[2] if error.ctx is not None else ""
    return click.UsageError(unknown_option(command, error.option_name, error.possibilities or ()), error.ctx)


def _added() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done; 1 the job failed; 2 wrong usage or description; 3 no such job or node; 4 refused;"
    " 5 no master answers; 6 not permitted; 7 our bug; 130 interrupted.",
)
@click.option(
    "--master",
    metavar="ADDRESS",
    help="Master: HOST:PORT, unix:PATH, or its state directory. Default: $GANGER_MASTER, else the cluster of"
    " `ganger up`.",
)
@click.version_option(package_name="ganger", message="%(version)s", help="Print the version of this client.")
@click.pass_context
def ganger(context: click.Context, master: str | None) -> None:
    """Gangs of GPUs, set to work whole, paused between two mini-batches, moved without losing a step."""
    context.obj = master


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print versions of client, master and daemons."""
    from ganger import __version__
    from ganger.cli.options import number, open_client
    from ganger.console import print_json
    from ganger.text import counted
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError

    try:
        with open_client() as client:
            theirs, nodes, why = client.get_cluster().version, list(client.list_nodes().nodes), ""
    except (ApiError, EndpointError) as error:
        # Users look up the version just when something does not work.
        theirs, nodes, why = "", [], str(error).partition("\n")[0]
    daemons = {number(node.name): node.version for node in nodes if node.version}
    if as_json:
        print_json({"client": __version__, "master": theirs or None, "daemons": daemons})
        return
    print(f"client {__version__}\nmaster {theirs or f'unknown ({why})'}")
    for each in sorted(set(daemons.values())):
        found = [name for name, of in daemons.items() if of == each]
        named = "" if each == theirs else f" ({' '.join(found)})"
        print(f"daemon {each} on {counted(len(found), 'node')}{named}")


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

    kind = get_completion_class(shell)
    assert kind is not None, f"click completes {shell}"
    print(kind(ganger, {}, "ganger", "_GANGER_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs a command and exits. Never shows a traceback."""
    # gRPC's own lines ("add_port.cc:83 ...") before our one sentence help no reader.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # The parent process closed these streams, so output is discarded.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal without a sign for "→" shall show "?" rather than nothing at all.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        result = ganger.main(args=arguments, prog_name="ganger", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        from ganger.console import report

        return report(error.__cause__ or error if isinstance(error, _ClosedPipe) else error)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
