"""Move the folders of the tests so that they mirror the packages: `PYTHONPATH=tools python -m restructure.move_tests`.

What follows is docs/design/009, part A, "Tests". Imports between tests and paths in text are changed. Commit before.
"""

from __future__ import annotations

import re
import subprocess
import sys

from guards.source_files import REPOSITORY, tracked_files

# Files first: they may go elsewhere than their folder.
MOVES = {
    "tests/policies/test_place_room.py": "tests/cluster/test_place_room.py",
    "tests/policies/test_place_rules.py": "tests/cluster/test_place_rules.py",
    "tests/policies/test_alike.py": "tests/cluster/test_alike.py",
    "tests/sim_reproduce/fakes.py": "tests/kit/experiments.py",
    "tests/policies/introspect": "tests/policies",
    "tests/resources": "tests/cluster",
    "tests/placement": "tests/cluster",
    "tests/approval": "tests/core",
    "tests/models": "tests/estimators",
    "tests/planning": "tests/planner_process",
    "tests/recording": "tests/decision_log",
    "tests/sim_cli": "tests/simulator/cli",
    "tests/sim_ideal": "tests/simulator/ideal",
    "tests/sim_replay": "tests/simulator/replay",
    "tests/sim_report": "tests/simulator/report",
    "tests/sim_traces": "tests/simulator/traces",
    "tests/sim_reproduce": "tests/experiments",
    "tests/benches": "tests/benchmarks",
    "tests/sim": "tests/faultsim",
    "tests/cores": "tests/daemon/cores",
    "tests/cgroups": "tests/daemon/cgroups",
    "tests/devices": "tests/daemon/devices",
    "tests/tidy": "tests/contracts",
}
_TEXTS = (".py", ".md", ".toml", ".txt", ".sh", "Makefile", "run")
# They tell how it was.
_HISTORY = ("docs/design/", "CHANGELOG.md", "tools/restructure/move_tests.py", "tools/restructure/rename_classes.py")


def target_of(name: str) -> str | None:
    """Return the new path of a file of the tests, or None if it stays."""
    for old, new in MOVES.items():
        if name == old or name.startswith(f"{old}/"):
            return new + name[len(old) :]
    return None


def dotted(path: str) -> str:
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def main() -> int:
    """Move and rewrite; print the number of files."""
    listed = subprocess.run(["git", "ls-files", "tests"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = {name: new for name in listed.stdout.split() if (new := target_of(name))}
    clashes = [
        f"{old}: {new} is there" for old, new in files.items() if (REPOSITORY / new).exists() and new not in files
    ]
    clashes += [new for new in files.values() if list(files.values()).count(new) > 1]
    if clashes:
        print("\n".join(clashes))
        return 1
    paths = re.compile("|".join(rf"(?<![\w/])((?:\.\./)*){re.escape(one)}(?![\w-])" for one in MOVES))
    modules = {dotted(old): dotted(new) for old, new in MOVES.items()}
    imports = re.compile(
        r"^(\s*\"?)(from|import) ("
        + "|".join(re.escape(one) for one in sorted(modules, key=len, reverse=True))
        + r")(?![\w])(.*)$",
        re.MULTILINE,
    )

    def import_line(found: re.Match[str]) -> str:
        indent, word, module, rest = found.groups()
        for old, new in modules.items():
            if (
                word == "from"
                and old.count(".") == 1
                and rest.startswith(f" import {old.split('.')[1]}")
                and old.startswith(f"{module}.")
            ):
                package, _, tail = new.rpartition(".")
                return f"{indent}from {package} import {tail} as {old.split('.')[1]}"
            if (
                f"{module}{rest}".startswith(old)
                and old not in modules.get(module, "")
                and old != module
                and rest[:1] == "."
            ):
                tail = f"{module}{rest}"[len(old) :]
                if tail[:1] in (" ", "."):
                    return f"{indent}{word} {new}{tail}"
        return f"{indent}{word} {modules[module]}{rest}"

    for name in list(tracked_files(REPOSITORY, suffixes=_TEXTS)):
        if name.startswith(_HISTORY):
            continue
        path = REPOSITORY / name
        before = after = path.read_text()
        if name.startswith(("tests/", "benchmarks/", "experiments/")) and name.endswith(".py"):
            # A few come by way of the repository's root.
            after = re.sub(r"^(from|import) tests\.(?=\w+)", r"\1 ", after, flags=re.MULTILINE)
            after = imports.sub(import_line, after)
        after = paths.sub(lambda found: _replaced(found.group()), after)
        new = files.get(name, name)
        deeper = new.count("/") - name.count("/")
        if deeper and name.endswith(".py"):
            after = _deeper(after, deeper)
        if after != before:
            path.write_text(after)
    for name, new in files.items():
        (REPOSITORY / new).parent.mkdir(parents=True, exist_ok=True)
        (REPOSITORY / name).rename(REPOSITORY / new)
    subprocess.run(["git", "add", "--all", "."], cwd=REPOSITORY, check=True)
    print(f"{len(files)} files moved")
    return 0


def _deeper(source: str, by: int) -> str:
    """Return a source whose file lies `by` folders deeper: it counts its parents from there."""
    pattern = r"(__file__\)(?:\.resolve\(\))?\.parents)\[(\d)\]"
    return re.sub(pattern, lambda one: f"{one[1]}[{int(one[2]) + by}]", source)


def _replaced(text: str) -> str:
    lead, _, rest = text.rpartition("tests/")
    return lead + MOVES[f"tests/{rest}"]


if __name__ == "__main__":
    sys.exit(main())
