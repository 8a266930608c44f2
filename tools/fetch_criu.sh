#!/usr/bin/env bash
# CRIU from Debian into a directory, beside the system's packages: fetch_criu.sh DIRECTORY COMMAND [SUITE].
# It brings its own C library, so that any Debian or Ubuntu can run it. COMMAND is a wrapper that finds both from its
# own place. What is there already stays.
set -euo pipefail
directory=$1 command=$2 suite=${3:-sid}
if [ -x "$command" ] && "$command" --version >/dev/null 2>&1; then exit 0; fi

keys=/usr/share/keyrings/debian-archive-keyring.gpg
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || { echo "CRIU comes from Debian's archive, and this machine has no $tool: install CRIU 4 or newer so that it is on the path" >&2; exit 3; }
done
[ -r "$keys" ] || { echo "no keys of Debian's archive ($keys): apt-get install debian-archive-keyring" >&2; exit 3; }

echo "== fetching CRIU from Debian $suite into $directory"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch"/state/lists/partial "$scratch"/cache/archives/partial "$scratch"/root
: > "$scratch/status"
echo "deb [signed-by=$keys] http://deb.debian.org/debian $suite main" > "$scratch/sources"
# A package manager of its own: empty status, lists and cache, so that nothing of the system is read or changed.
get() {
    apt-get -qq -o Dir::State="$scratch/state" -o Dir::State::status="$scratch/status" -o Dir::Cache="$scratch/cache" \
        -o Dir::Etc::SourceList="$scratch/sources" -o Dir::Etc::SourceParts=/dev/null -o Debug::NoLocking=1 \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=3 "$@"
}
get update
get install -y --download-only --no-install-recommends criu >/dev/null
for package in "$scratch"/cache/archives/*.deb; do dpkg-deb -x "$package" "$scratch/root"; done

loader=$(cd "$scratch/root" && find usr/lib -name 'ld-linux-*.so.*' | sort | head -1)
[ -x "$scratch/root/usr/sbin/criu" ] && [ -n "$loader" ] || { echo "the packages have no CRIU or no C library" >&2; exit 1; }
rm -rf "$directory" && mkdir -p "$(dirname "$directory")"
mv "$scratch/root" "$directory"
cat > "$command.new" <<WRAPPER
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/$(realpath --relative-to="$(dirname "$command")" "$directory")
libraries=\$root/$(dirname "$loader")
exec "\$root/$loader" --library-path "\$libraries" "\$root/usr/sbin/criu" "\$@"
WRAPPER
chmod 755 "$command.new"
mv "$command.new" "$command"
"$command" --version
