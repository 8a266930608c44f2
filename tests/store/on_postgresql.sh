#!/usr/bin/env bash
# The store's contract on a PostgreSQL server of its own, which ends with the tests: on_postgresql.sh PYTHON
set -euo pipefail
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)
[ -n "$bin" ] || { echo "no PostgreSQL server here: apt-get install postgresql" >&2; exit 1; }
home=$(mktemp -d)
# The server refuses to run as root.
as=()
if [ "$(id -u)" = 0 ]; then as=(runuser -u postgres --); chown postgres "$home"; fi
trap '"${as[@]}" "$bin/pg_ctl" -D "$home/data" -m fast stop >/dev/null; rm -rf "$home"' EXIT
"${as[@]}" "$bin/initdb" -D "$home/data" -A trust -U ganger >"$home/log"
"${as[@]}" "$bin/pg_ctl" -D "$home/data" -o "-k $home -c listen_addresses=''" -l "$home/server.log" -w start >/dev/null
GANGER_TEST_POSTGRESQL="postgresql+psycopg://ganger@/postgres?host=$home" "$1" -m pytest -q tests/store -k postgresql
