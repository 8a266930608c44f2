"""The row `writer` on PostgreSQL: the term that every commit checks, and the lease of the master that leads.

Three locks of that row keep a former leader from committing, without commits and renewals waiting for each other:

* A commit reads the term under FOR KEY SHARE.
* A renewal updates the expiry, which changes no key: it waits for no commit, and no commit for it.
* A master that takes the lease locks the row FOR UPDATE, so it waits until no commit under the former term is under
  way. A leader that was stopped in the middle of a commit would hold it up for ever. So its transaction is ended.

All times are of the database's clock.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Double, cast, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate, may_take
from ganger_master.store.tables import writer

# Longest wait for a commit of a leader whose lease has expired.
_LOCK_WAIT_MS: Final = 200
# PostgreSQL's codes of a lock that was not available, and of a right that a role lacks.
_NOT_AVAILABLE: Final = "55P03"
_NO_RIGHT: Final = "42501"
# What a stand-by finds while another master takes the lease for the first time.
_BEING_TAKEN: Final = LeaderLease(0, "", "", 0.0)
# The expiry of a lease that its leader has given back.
_GIVEN_BACK: Final = 0.0
_NOW: Final = cast(func.extract("epoch", func.clock_timestamp()), Double)
_LEASE: Final = select(
    writer.c.generation,
    func.coalesce(writer.c.holder, "").label("holder"),
    func.coalesce(writer.c.address, "").label("address"),
    (func.coalesce(writer.c.expiry, 0.0) - _NOW).label("left"),
)
# Only masters lock the row: their sessions are those with such a lock on its table. Tables of other databases of the
# same server may have the same number.
_END_COMMITS: Final = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = 'writer'::regclass AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND mode IN ('RowShareLock', 'RowExclusiveLock') AND pid <> pg_backend_pid()"
)


def read_lease(connection: Connection, *, is_locked: bool = False) -> LeaderLease | None:
    """Return the present lease; None where no master has ever led. `is_locked`: lock its row, as a taker does."""
    row = connection.execute(_LEASE.with_for_update() if is_locked else _LEASE).one_or_none()
    return None if row is None else LeaderLease(row.generation, row.holder, row.address, row.left)


def take_lease(connection: Connection, candidate: LeaseCandidate) -> int | LeaderLease:
    """Take the lease, in the connection's transaction. Return the term, or the lease of another master that lasts."""
    found = read_lease(connection)
    if found is not None and not may_take(found):
        return found
    connection.execute(text(f"SET LOCAL lock_timeout = {_LOCK_WAIT_MS}"))
    # Again, under the lock: another stand-by may have taken it meanwhile.
    found = read_lease(connection, is_locked=True)
    if found is not None and not may_take(found):
        return found
    term = 1 if found is None else found.term + 1
    values = {"generation": term, "holder": candidate.holder, "address": candidate.address}
    if found is None:
        # Of masters that find no row together, one inserts it.
        row = insert(writer).values(id=1, expiry=_NOW + candidate.lease_s, **values)
        if connection.execute(row.on_conflict_do_nothing().returning(writer.c.id)).first() is None:
            return read_lease(connection) or _BEING_TAKEN
    else:
        connection.execute(update(writer).values(expiry=_NOW + candidate.lease_s, **values))
    return term


def is_held_up(error: DBAPIError) -> bool:
    """Return whether a master could not take the lease because another one's transaction is under way."""
    return getattr(error.orig, "sqlstate", None) == _NOT_AVAILABLE


def has_no_right(error: DBAPIError) -> bool:
    """Return whether the database refused a statement for lack of a right."""
    return getattr(error.orig, "sqlstate", None) == _NO_RIGHT


def end_commits(connection: Connection) -> LeaderLease | None:
    """End the transactions of other masters on this database, which a taker has waited for in vain.

    Return the lease of another master instead, if that one has it meanwhile, or is taking it for the first time."""
    found = read_lease(connection)
    if found is None or not may_take(found):
        return found or _BEING_TAKEN
    connection.execute(_END_COMMITS)
    return None


def held_up_by(connection: Connection) -> LeaderLease:
    """Return the lease for a taker that another one's transaction holds up: it stands by, and tries again."""
    return read_lease(connection) or _BEING_TAKEN


def renew_lease(connection: Connection, term: int, lease_s: float) -> bool:
    """Let the lease last `lease_s` from now on. Return False, with no change, if the term is another master's, or the
    lease was given back."""
    # One that was given back is not renewed by a renewal that was under way.
    is_ours = (writer.c.generation == term, writer.c.expiry > _GIVEN_BACK)
    renewal = update(writer).where(*is_ours).values(expiry=_NOW + lease_s)
    return connection.execute(renewal).rowcount == 1


def give_back_lease(connection: Connection, term: int) -> None:
    """End the lease, if the term is still this one."""
    connection.execute(update(writer).where(writer.c.generation == term).values(expiry=_GIVEN_BACK))


def check_term(connection: Connection, term: int) -> bool:
    """Return whether the term is still this one, and keep it so until the transaction ends."""
    # A text for the driver: every commit passes here.
    found = connection.exec_driver_sql(f"SELECT 1 FROM {writer.name} WHERE generation = {term} FOR KEY SHARE")
    return found.first() is not None
