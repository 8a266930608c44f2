"""Modules are moved by the table of renames, and what names them follows."""

from __future__ import annotations

from restructure.move_modules import dotted, first_names, planned_moves, rewritten_imports

ROWS = [
    ("p.old", ("p.room",)),
    ("p.old.view", ("p.room.view",)),
    ("p.old.kept", ("p.room.index",)),
    ("p.old.index", ("p.room.index",)),
    ("p.old.both", ("p.room.one", "p.room.two")),
    ("p.old.dead", ()),
    ("p.plain", ("p.plain",)),
    ("p.joins", ("p.plain",)),
]


def test_a_new_name_goes_to_the_module_of_the_same_last_name_and_others_come_to_the_same_room() -> None:
    names = first_names(ROWS, {"p.old"})
    assert names == {
        "p.old": "p.room",
        "p.old.view": "p.room.view",
        "p.old.kept": "p.room.kept",
        "p.old.index": "p.room.index",
        "p.old.both": "p.room.both",
        "p.old.dead": "p.room.dead",
        "p.plain": "p.plain",
        "p.joins": "p.joins",
    }


def test_only_modules_under_a_prefix_that_are_there_are_moved() -> None:
    names = first_names(ROWS, {"p.old"})
    assert planned_moves(names, ["p.old"], {"p.old.view", "p.plain"}) == {"p.old.view": "p.room.view"}
    assert planned_moves(names, ["p.o"], names.keys()) == {}


def test_imports_of_a_moved_module_keep_the_name_by_which_code_knows_it() -> None:
    source = "from p.old import kept, view as seen\nfrom p.old import other\nif True:\n    from p.old import index\n"
    moves = {"p.old.kept": "p.room.capacity", "p.old.view": "p.room.view", "p.old.index": "p.room.index"}
    assert rewritten_imports(source, "q", False, moves, moves.keys()) == (
        "from p.room import capacity as kept\nfrom p.room import view as seen\nfrom p.old import other\n"
        "if True:\n    from p.room import index\n"
    )


def test_relative_imports_of_a_module_that_moves_become_absolute() -> None:
    source = "from . import view\nfrom .index import Index\nfrom ..plain import X\n"
    moves = {"p.old.view": "p.room.view", "p.old.here": "p.room.here"}
    changed = rewritten_imports(source, "p.old.here", False, moves, {*moves, "p.old.index", "p.plain"})
    assert changed == "from p.room import view\nfrom p.old.index import Index\nfrom p.plain import X\n"


def test_a_package_is_renamed_only_where_no_submodule_follows() -> None:
    pattern = dotted({"p.old": "p.room", "p.old.view": "p.room.view"}, {"p.old"})
    found = [match.group() for match in pattern.finditer('"p.old" p.old.view.View p.old.other xp.old p.older')]
    assert found == ["p.old", "p.old.view"]
