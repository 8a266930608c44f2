"""`ganger certs`, `ganger tokens`, `ganger record`: certificates and access tokens, recordings of what a master
decides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, Directory, Within, print_json, print_table
from ganger.text import counted, format_memory, os_reason, parse_duration, parse_memory

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import Token
    from ganger.wire.methods import CallerIdentity

_ROLES = ("master", "daemon", "user", "operator", "scheduler", "planner")
_MOST_S = 3600
_days_option = click.option(
    "--days", type=Within(min=0.0001, max=3650.0), default=365.0, show_default=True, help="How long it lasts."
)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what the authority cannot make into the error of a command."""
    from ganger.wire.certificate_authority import CertificateError

    try:
        yield
    except CertificateError as error:
        raise CommandError(str(error)) from error


@click.group()
def certs() -> None:
    """Make certificates for a cluster of several machines."""


@certs.command()
@click.argument("directory", type=Directory())
def init(directory: Path) -> None:
    """Make the authority of a cluster in DIRECTORY.

    ca-key.pem there makes certificates: with it, every role in the cluster can be taken. Keep it where no job runs.
    """
    from ganger.wire.certificate_authority import AUTHORITY_KEY, make_authority

    with _explained():
        made = make_authority(directory)
    click.echo(f"made the authority {made}; keep {directory / AUTHORITY_KEY} to yourself")


@certs.command()
@click.argument("directory", type=Directory())
@click.option("--role", type=click.Choice(_ROLES), required=True, help="What its holder is there for.")
@click.option("--name", required=True, help="Of a user the user's, of a daemon that of its node.")
@click.option("--host", "hosts", multiple=True, help="Name or address others reach it at; repeat for more.")
@click.option(
    "--out", type=Directory(), required=True, help="Directory for key.pem, cert.pem, ca.pem; made if missing."
)
@_days_option
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
    with _explained():
        end = certificates.issue(directory, identity, hosts, days, out)
    click.echo(f"issued {out} to {identity}, until {end:%Y-%m-%d %H:%M} UTC")


@certs.command()
@click.argument("directory", type=Directory())
@click.argument("certificate", type=Directory())
@_days_option
def renew(directory: Path, certificate: Path, days: float) -> None:
    """Replace the files in CERTIFICATE by new ones of the same role, name and hosts, by the authority in DIRECTORY.

    Master and daemons use them for new connections at once, without a restart.
    """
    from ganger.wire import certificate_authority as certificates

    with _explained():
        identity, end = certificates.renew(directory, certificate, days)
    click.echo(f"renewed {certificate} of {identity}, until {end:%Y-%m-%d %H:%M} UTC")


@certs.command("list")
@click.argument("directory", type=Directory())
@json_option
def list_issued(directory: Path, as_json: bool) -> None:
    """List the certificates that the authority in DIRECTORY has issued."""
    from ganger.wire import certificate_authority as certificates

    with _explained():
        found, problems = certificates.issued_certificates(directory)
    for problem in problems:
        click.echo(problem, err=True)
    now = datetime.now(UTC)
    rows = []
    for one in found:
        state = "revoked" if one.is_revoked else "expired" if one.end < now else "valid"
        rows.append((f"{one.serial:x}", str(one.identity.role), one.identity.name, f"{one.end:%Y-%m-%d %H:%M}", state))
    if as_json:
        print_json([dict(zip(("serial", "role", "name", "until", "state"), row, strict=True)) for row in rows])
        return
    headings = ("SERIAL", "ROLE", "NAME", "UNTIL (UTC)", "STATE")
    print_table(headings, rows, f"no certificate is on record in {directory}")


@certs.command()
@click.argument("directory", type=Directory())
@click.argument("certificates", nargs=-1, required=True, metavar="CERTIFICATE...")
@click.option("--to", type=Directory(), help="Where the master has its certificate: it gets the list at once.")
def revoke(directory: Path, certificates: tuple[str, ...], to: Path | None) -> None:
    """Revoke certificates by the authority in DIRECTORY.

    CERTIFICATE is a serial number as `ganger certs list` shows it, ROLE/NAME for all of a role and name, or a directory
    with a cert.pem. The list is revoked.pem in DIRECTORY. A master that finds it beside its own certificate refuses
    what is on it within a second, and hands it to the daemons.
    """
    revoke_certificates(directory, [_certificate(directory, named) for named in certificates], to)


def revoke_certificates(directory: Path, certificates: Sequence[int | CallerIdentity], to: Path | None) -> None:
    """Revoke certificates by the authority in `directory`, by serial number or identity, and print what is revoked and
    what is left to do. `to`: directory of the master's certificate, if it is here. Raises CommandError."""
    from ganger.wire import certificate_authority as authority

    with _explained():
        done = authority.revoke(directory, certificates)
        click.echo(f"revoked {', '.join(f'{serial:x}' for serial in done.serials)}")
        if to is not None:
            authority.publish(done.path, to)
    # A stolen certificate may have been renewed by the thief.
    for party in dict.fromkeys(one.identity for one in done.others):
        left = [one for one in done.others if one.identity == party]
        click.echo(
            f"{party} has {counted(len(left), 'other certificate')} still in use: if the key was stolen, revoke"
            f" all of them by `ganger certs revoke {directory} {party.role}/{party.name}`",
            err=True,
        )
    for problem in done.problems:
        click.echo(f"{problem}: if it was of the same party, revoke its serial number, the file's name", err=True)
    if to is None:
        click.echo(f"copy {done.path} into the directory of the master's certificate: it takes effect there", err=True)


def _certificate(directory: Path, named: str) -> int | CallerIdentity:
    """Return the certificate that is meant, or the identity of several. Raises CommandError."""
    from ganger.wire import certificate_authority as authority
    from ganger.wire.methods import CallerIdentity, CallerRole

    role, is_identity, name = named.partition("/")
    with suppress(ValueError), _explained():
        if os.path.isdir(named):
            return authority.serial_in(directory, Path(named))
        if is_identity:
            return CallerIdentity(CallerRole(role), name)
        if authority.is_on_record(directory, serial := int(named, 16)):
            return serial
    raise CommandError(
        f"no certificate {named!r} is on record: `ganger certs list` shows those that are; for another one name the"
        " directory with its cert.pem"
    )


@click.group()
def tokens() -> None:
    """Access tokens of people, in place of certificates."""


@tokens.command("create")
@click.argument("user")
@click.option("--expires", metavar="TIME", default="90d", show_default=True, help="How long it lasts, at most a year.")
@click.option(
    "--out", type=Directory(), help="Directory for token and ca.pem, as its holder needs it; made if missing."
)
@json_option
def create_token(user: str, expires: str, out: Path | None, as_json: bool) -> None:
    """Make a token for USER, and print it, once. Its holder is that user, as with a certificate of the role `user`."""
    from ganger.wire import times
    from ganger.wire.endpoints import TOKEN_FILE

    try:
        lasts_s = parse_duration(expires)
    except ValueError as error:
        raise click.UsageError(f"--expires: {error}") from error
    if out is not None and (out / TOKEN_FILE).exists():
        raise CommandError(f"there is {out / TOKEN_FILE} already: name another directory, or remove it")
    with open_client() as client:
        made = client.create_token(user, lasts_s)
        address = client.get_cluster().token_address
    if out is not None:
        _write_token(out, made, Path(client.endpoint.tls))
        made.text = ""
    if as_json:
        print_json(made)
    elif out is None:
        print(made.text)
    end = times.local_datetime(made.expire_time).strftime("%Y-%m-%d %H:%M")
    click.echo(f"token {made.name} of {user}, until {end}; it is not shown again", err=True)
    where = out or "DIR, which has ca.pem and the token in a file `token` (chmod 600)"
    click.echo(f"used by: GANGER_MASTER={address} GANGER_TLS={where}", err=True)


def _write_token(out: Path, token: Token, own: Path) -> None:
    """Write a token, and the certificate of the authority in the operator's own directory. Raises CommandError."""
    from ganger.wire.endpoints import TOKEN_FILE
    from ganger.wire.tls import AUTHORITY

    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(out / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token.text}\n")
        if (own / AUTHORITY).is_file():
            shutil.copyfile(own / AUTHORITY, out / AUTHORITY)
        else:
            click.echo(f"copy ca.pem of the cluster's certificates into {out}", err=True)
    except OSError as error:
        remedy = f"`ganger tokens revoke {token.name}`, and make another"
        raise CommandError(f"cannot write into {out}: {os_reason(error)}; {remedy}") from error


@tokens.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """List tokens, those too that have ended in the last 30 days."""
    from ganger.wire import times

    with open_client() as client:
        found = client.list_tokens()
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC).timestamp()
    rows = [
        (
            one.name,
            one.user,
            times.local_datetime(one.expire_time).strftime("%Y-%m-%d %H:%M"),
            "revoked" if one.HasField("revoke_time") else "expired" if times.unix_s(one.expire_time) < now else "valid",
            one.creator,
        )
        for one in found
    ]
    print_table(("ID", "USER", "UNTIL", "STATE", "BY"), rows, "there are no tokens")


@tokens.command("revoke")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
def revoke_tokens(names: tuple[str, ...]) -> None:
    """Refuse tokens from now on. ID is as `ganger tokens list` shows it."""
    with open_client() as client:
        for name in names:
            print(f"revoked {name} of {client.revoke_token(name).user}")


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
    click.echo(f"{counted(found.commands, 'command', ',')} in {took:.1f} s, {size}: {found.end_reason}", err=True)


def _copied(recorded: Path, out: Path) -> Path:
    """Copy a recording to `out`, readable by its owner only, and return `out`. Raises CommandError."""
    try:
        with recorded.open("rb") as source:
            descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as target:
                shutil.copyfileobj(source, target)
    except OSError as error:
        why = os_reason(error)
        raise CommandError(f"cannot copy {recorded} to {out}: {why}; it is on the master's machine") from error
    return out
