"""Check what `tuning` in params.yaml names: cells, workloads, recipes."""

from __future__ import annotations

from pipeline.cells import Cell
from pipeline.errors import InputError, unknown
from pipeline.plan_on_target import FILLERS
from pipeline.specs import Params


def check_tuning(params: Params, where: str) -> None:
    """Check every entry of `tuning`.

    Raises:
        InputError: a key that is no cell, an unknown workload, or, where the cell is measured, a recipe that is not
            made there.
    """
    for name, tuning in params.tuning.items():
        place = f"{where} (tuning.{name})"
        try:
            cell = Cell.parse(name)
            cell.check(params)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        made = _measured(params, cell)
        if tuning.workload not in params.workloads:
            raise unknown("workload", tuning.workload, params.workloads, place)
        if params.workloads[tuning.workload].mix or params.workloads[tuning.workload].soak:
            raise InputError(f"{place}: workload {tuning.workload} is a mix or a soak; fixed lengths are needed.")
        if cell.recipe not in made:
            continue  # the matrix does not measure the cell (now), so nothing is tuned and no package is needed
        others = {v.recipe for v in tuning.variants.values() if v.recipe}
        if len(others) > len(FILLERS):
            raise InputError(f"{place}: its variants name {len(others)} other recipes; {len(FILLERS)} can be tried.")
        for variant, tried in tuning.variants.items():
            if tried.recipe is not None and tried.recipe not in made:
                raise unknown("recipe that is measured there", tried.recipe, made, f"{place}, variant {variant}")


def _measured(params: Params, cell: Cell) -> list[str]:
    """Return the recipes that the matrix measures for the cell's model, runtime and target."""
    rows = [
        row for row in params.matrix
        if row.measure and cell.model in row.models
        and cell.runtime in row.runtimes and cell.target in row.targets
    ]  # fmt: skip
    return list(dict.fromkeys(recipe for row in rows for recipe in row.recipes))
