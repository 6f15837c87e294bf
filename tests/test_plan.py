import json

import pytest

from recoup import Plan, PlanError, solve
from recoup.generators import chain
from recoup.planfile import load_graph_or_plan


@pytest.fixture
def plan():
    return Plan.of(solve(chain(4), 4, "checkmate"))


def test_save_and_load(plan, tmp_path):
    path = tmp_path / "chain.plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert load_graph_or_plan(path) == plan
    plan.graph.save(tmp_path / "g.json")
    assert load_graph_or_plan(tmp_path / "g.json") == plan.graph


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "recoup-graph", "not a recoup-plan file"),
        ("version", 2, "version 2 is not supported"),
        ("fingerprint", "0" * 64, "the fingerprints differ"),
        ("cost", 1, "promises cost 1, but its schedule has 11"),
        ("peak_bytes", 1, "promises peak_bytes 1"),
        ("budget_bytes", 3, "over its budget of 3"),
        ("schedule", ["f1"], "the plan is broken: op 'f2' never runs"),
        ("schedule", 3, "schedule must be a list"),
        ("graph", {}, "the plan is broken: the graph has no 'format'"),
        ("graph", 7, "the plan is broken: the graph must be an object"),
        ("color", 1, "unknown key 'color'"),
        ("budget_bytes", "x", "budget_bytes must be a number or null"),
        ("version", True, "version True is not supported"),
        ("scope", 3, "scope must be a string"),
        ("profiled_on", 3, "profiled_on must be a string"),
        ("method", None, "the plan has no 'method'"),
    ],
)
def test_broken_plans_are_refused(plan, key, value, message):
    data = json.loads(plan.to_json())
    data[key] = value
    if value is None:
        del data[key]
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))


def test_no_schedule_no_plan():
    with pytest.raises(PlanError, match="no schedule to save: infeasible"):
        Plan.of(solve(chain(2), 1))
