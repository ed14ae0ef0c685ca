"""What `make test` draws so that it keeps its time (tests/budget.py)."""

from __future__ import annotations

import json
from pathlib import Path

import budget
import numpy as np
import pytest


def drawn_costs(rng: np.random.Generator) -> list[float | None]:
    return [float(cost) if cost > 0.5 else None for cost in 2 ** rng.uniform(-5, 5, 400)]


def test_runs_take_the_budget_in_the_mean_and_every_test_has_its_turns(rng: np.random.Generator) -> None:
    costs = drawn_costs(rng)
    names = [f"tests/t.py::test_it[{number}]" for number in range(len(costs))]
    allowed = sum(cost or 0.05 for cost in costs) * float(rng.uniform(0.3, 0.7))
    scale = budget.scale_of(costs, allowed)
    runs = [
        [name for name, cost in zip(names, costs, strict=True) if not cost or budget.is_drawn(name, cost, scale, i)] for i in range(100)
    ]
    of = dict(zip(names, costs, strict=True))
    taken = [sum(of[name] or 0.05 for name in run) for run in runs]
    assert 0.95 * allowed < np.mean(taken) < 1.05 * allowed
    assert set(names) == {name for run in runs for name in run}
    assert all(set(run) >= {name for name, cost in of.items() if not cost} for run in runs), "cheap ones always run"


def test_what_fits_runs_whole(rng: np.random.Generator) -> None:
    costs = drawn_costs(rng)
    scale = budget.scale_of(costs, sum(cost or 0.05 for cost in costs) + 1)
    assert all(budget.is_drawn(str(number), cost, scale, 0) for number, cost in enumerate(costs) if cost)


def test_costs_are_kept_by_function(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"a.py::test_old": 3.0, "a.py::test_new": 9.0, "a.py::test_cheap": 2.0}))
    budget.write({"a.py::test_new": [1.0, 2.0], "a.py::test_cheap": [0.1]}, path)
    assert budget.read(path) == {"a.py::test_old": 3.0, "a.py::test_new": 1.5}


def test_costs_that_grew_are_told(rng: np.random.Generator) -> None:
    known = {name: float(rng.uniform(0.5, 20)) for name in "abcd"}
    measured = {one: [known[one] * factor, known[one] * factor + more] for one, factor, more in [("a", 1, 5), ("b", 3, 0), ("c", 3, 11)]}
    assert budget.outgrown(measured | {"new": [1.0], "new and long": [9.0]}, known).keys() == {"c", "new and long"}


def test_known_costs_are_of_tests_that_exist(request: pytest.FixtureRequest) -> None:
    root = Path(__file__).parents[2]
    for name in budget.read():
        path, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (root / path).read_text(), f"{name} has gone: remove it from tests/costs.json"
