"""The source keeps its own rules: documented modules, no stray words, generated code as the protos say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "client" / "ganger", ROOT / "master" / "ganger_master", ROOT / "daemon" / "ganger_daemon")
CHECKOUT = (ROOT / "benchmarks", ROOT / "experiments", ROOT / "examples" / "demo", ROOT / "tests" / "faultsim")
PURE = (
    ROOT / "client/ganger/protocol",
    ROOT / "client/ganger/cluster",
    ROOT / "master/ganger_master/core",
    ROOT / "master/ganger_master/policies",
    ROOT / "master/ganger_master/estimators",
    ROOT / "master/ganger_master/planner",
    ROOT / "daemon/ganger_daemon/core",
)
# Calls whose answer differs from run to run; what decides gets time and seeds as arguments.
IMPURE_CALLS = re.compile(r"\b(time\.(time|monotonic)|datetime\.now|random\.|uuid4|os\.environ|getLogger|print\()")


def sources(*roots: Path) -> Iterator[Path]:
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not re.search(r"_pb2(_grpc)?\.py$", path.name):
                yield path


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", list(sources(*PACKAGES, *CHECKOUT)), ids=name_of)
def test_module_opens_with_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("path", list(sources(*PURE)), ids=name_of)
def test_what_decides_asks_no_clock_no_dice_and_no_environment(path: Path) -> None:
    found = IMPURE_CALLS.findall(path.read_text())
    assert not found, f"{name_of(path)} uses {found}"


def test_no_unfinished_work_is_left_in_the_source() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    found = [
        f"{name_of(path)}:{number}"
        for path in sources(*PACKAGES, *CHECKOUT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found


def test_user_interpreter_code_parses_as_python_3_9() -> None:
    for path in sources(*(ROOT / "client/ganger" / part for part in ("injob", "protocol", "training"))):
        ast.parse(path.read_text(), feature_version=(3, 9))


def test_generated_code_holds_every_message_of_the_protos() -> None:
    """A cheap guard for everyday runs; `make protos && git diff --exit-code` is the full one."""
    import ganger.v1.job_service_pb2  # the package must import without a warning

    assert ganger.v1.job_service_pb2.DESCRIPTOR.package == "ganger.v1"
    for proto in sorted((ROOT / "protos").rglob("*.proto")):
        generated = ROOT / "client" / proto.relative_to(ROOT / "protos").with_name(f"{proto.stem}_pb2.pyi")
        classes = set(re.findall(r"^class (\w+)", generated.read_text(), re.MULTILINE))
        declared = set(re.findall(r"^message (\w+)", proto.read_text(), re.MULTILINE))
        assert declared <= classes, f"run `make protos`: {proto.name} has {declared - classes} more"


def test_import_of_the_package_pulls_in_nothing_heavy() -> None:
    code = "import sys, ganger; print([m for m in ('grpc', 'rich', 'click', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
