"""How a gang's local part ended, kept on disk: once written it never changes, whatever is found later."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import NamedTuple

from ganger_daemon.core.orders import FoundCheckpoint, PartOutcome, PartOutcomeKind
from ganger_daemon.node.directories import GangPaths
from ganger_daemon.node.safe_files import make_directory, read_json, write_json

log = logging.getLogger(__name__)


class StoredOutcome(NamedTuple):
    """`step` is that of the checkpoint it ended with, if it did."""

    outcome: PartOutcome
    step: int | None


def keep(paths: GangPaths, outcome: PartOutcome, step: int | None) -> None:
    """Durable when it returns."""
    fields = {
        "kind": int(outcome.kind),
        "exit_code": outcome.exit_code,
        "rank": outcome.rank,
        "message": outcome.message,
        "step": step,
        "found": [asdict(one) for one in outcome.found],
    }
    make_directory(paths.job)
    write_json(paths.outcome, fields, durable=True)


def kept(paths: GangPaths) -> StoredOutcome | None:
    """What a former daemon kept; None if the gang has not ended."""
    fields = read_json(paths.outcome)
    if not fields:
        return None
    try:
        kind, code, rank = (int(fields[name]) for name in ("kind", "exit_code", "rank"))
        step = None if fields.get("step") is None else int(fields["step"])
        found = tuple([FoundCheckpoint(**one) for one in fields.get("found", ())])
        return StoredOutcome(PartOutcome(PartOutcomeKind(kind), code, rank, str(fields["message"]), found), step)
    except (KeyError, TypeError, ValueError) as error:
        log.warning("outcome cannot be read", extra={"path": str(paths.outcome), "error": repr(error)})
        return None
