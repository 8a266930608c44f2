"""Classes get the names of the table where they are defined and used, and nowhere else."""

from __future__ import annotations

from restructure.rename_classes import renamed, renames_of, with_reexports

RENAMES = {("p.a", "Pace"): "PlanPace", ("p.b", "Pace"): "StepRate"}
MODULES = {"p.a", "p.b", "p.c"}


def test_rows_of_part_b_give_new_names_and_those_that_keep_theirs_give_none() -> None:
    table = (
        "## A\n\n| X | `p.z.X` | `Y` |\n\n## B. Names\n\n| name | class today | name to be |\n|---|---|---|\n"
        "| Pace | `p.a.Pace` | `PlanPace` |\n|  | `p.b.Pace` | `StepRate` (merged) |\n|  | `p.c.Pace` | kept |\n"
    )
    assert renames_of(table) == RENAMES


def test_a_definition_and_its_uses_are_renamed_in_code_and_in_fields_of_f_strings() -> None:
    source = 'class Pace: ...\nx: Pace = 1\ny.Pace = f"Pace {Pace.x} {y.Pace}"\n__all__ = ["Pace"]\n'
    assert renamed(source, "p.a", RENAMES, MODULES) == (
        'class PlanPace: ...\nx: PlanPace = 1\ny.Pace = f"Pace {PlanPace.x} {y.Pace}"\n__all__ = ["PlanPace"]\n'
    )


def test_each_file_follows_the_module_that_it_imports_from() -> None:
    source = "from p.a import Pace as Own\nfrom p.b import Pace\nfrom p import a\nuse(Own, Pace, a.Pace)\n"
    assert renamed(source, "q", RENAMES, MODULES) == (
        "from p.a import PlanPace as Own\nfrom p.b import StepRate\nfrom p import a\nuse(Own, StepRate, a.PlanPace)\n"
    )


def test_a_class_of_the_same_name_elsewhere_is_left_alone() -> None:
    source = "class Pace: ...\nfrom p.c import Other\nPace()\n"
    assert renamed(source, "p.d", RENAMES, MODULES) == source


def test_a_class_imported_from_a_module_that_imports_it_itself_is_renamed_too() -> None:
    sources = {"p.c": "from p.a import Pace\n", "p.d": "from p.c import Pace\n"}
    found = with_reexports(RENAMES, sources)
    assert found["p.c", "Pace"] == found["p.d", "Pace"] == "PlanPace"
