"""`ganger version`: of this client, and of the master if one answers."""

from __future__ import annotations

import click

from ganger import __version__
from ganger.cli.options import json_option, open_client


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print versions of client and master."""
    from ganger.console.json_output import print_json
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
