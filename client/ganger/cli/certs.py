"""`ganger certs`: create the cluster's own certificate authority and issue certificates."""

from __future__ import annotations

from pathlib import Path

import click

from ganger.console import CommandError, Directory, Within

_ROLES = ("master", "daemon", "user", "operator", "scheduler", "planner")


@click.group()
def certs() -> None:
    """Make certificates for a cluster of several machines."""


@certs.command()
@click.argument("directory", type=Directory())
def init(directory: Path) -> None:
    """Make the authority of a cluster in DIRECTORY.

    ca-key.pem there makes certificates: with it, every role in the cluster can be taken. Keep it where no job runs.
    """
    from ganger.wire.certificate_authority import AUTHORITY_KEY, CertificateError, make_authority

    try:
        made = make_authority(directory)
    except CertificateError as error:
        raise CommandError(str(error)) from error
    click.echo(f"made the authority {made}; keep {directory / AUTHORITY_KEY} to yourself")


@certs.command()
@click.argument("directory", type=Directory())
@click.option("--role", type=click.Choice(_ROLES), required=True, help="What its holder is there for.")
@click.option("--name", required=True, help="Of a user the user's, of a daemon that of its node.")
@click.option("--host", "hosts", multiple=True, help="Name or address others reach it at; repeat for more.")
@click.option(
    "--out", type=Directory(), required=True, help="Directory for key.pem, cert.pem, ca.pem; made if missing."
)
@click.option(
    "--days", type=Within(min=0.0001, max=3650.0), default=365.0, show_default=True, help="How long it lasts."
)
def issue(directory: Path, role: str, name: str, hosts: tuple[str, ...], out: Path, days: float) -> None:
    """Issue a certificate by the authority in DIRECTORY.

    Masters and daemons accept connections and need --host; other roles have none.
    """
    from ganger.wire import certificate_authority as certificates
    from ganger.wire.methods import CallerIdentity, CallerRole, is_name
    from ganger.wire.resource_names import is_node_id

    if not is_name(name) or (role == CallerRole.DAEMON and not is_node_id(name)):
        raise click.UsageError(
            f"--name {name!r}: letters, digits, '.', '-', '_'{'' if role == CallerRole.DAEMON else ', @'}, at most 63,"
            " starting and ending with a letter or digit"
        )
    identity = CallerIdentity(CallerRole(role), name)
    try:
        certificates.check_hosts(identity.role, hosts)
    except certificates.CertificateError as error:
        raise click.UsageError(str(error)) from error
    try:
        end = certificates.issue(directory, identity, hosts, days, out)
    except certificates.CertificateError as error:
        raise CommandError(str(error)) from error
    click.echo(f"issued {out} to {identity}, until {end:%Y-%m-%d %H:%M} UTC")
