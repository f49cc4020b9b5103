"""The capacity planner: what fits on which GPU, for how many users, how fast. No weights are read."""

from compress.planner.fit import FitReport, fits
from compress.planner.picture import draw
from compress.planner.plan import PlanReport, run_plan
from compress.planner.render import as_json, print_plan

__all__ = ["FitReport", "PlanReport", "as_json", "draw", "fits", "print_plan", "run_plan"]
