import json

import pytest

from recoup import BudgetError, GraphBuilder, curve, simulate, solve
from recoup.generators import chain, random_training, unet_like
from recoup.planners.reorder import thrifty_order
from recoup.tradeoff import parse_budgets
from tests.test_cli import recoup


def test_curve_is_monotone_and_within_budget():
    graph = unet_like(4)
    found = curve(graph, [k / 10 for k in range(2, 11)], ["optimal", "linearized-greedy"], time_limit=5)
    assert list(found) == ["optimal", "linearized-greedy"]
    row = found["optimal"]
    assert [s.budget_bytes for s in row] == sorted((s.budget_bytes for s in row), reverse=True)
    assert len(row) == 9
    costs = [s.cost for s in row if s.cost is not None]
    assert costs == sorted(costs)
    for s in row:
        if s.cost is None:
            assert s.status in ("infeasible", "unknown")
            continue
        assert simulate(graph, s.schedule.steps()).peak_bytes <= s.budget_bytes
        assert s.lower_bound <= s.cost
        alone = solve(graph, s.budget_bytes, time_limit=5)
        assert s.cost <= alone.cost * 1.005
    for best, other in zip(row, found["linearized-greedy"], strict=True):
        assert other.cost is None or best.cost <= other.cost


def test_budgets():
    assert parse_budgets("0.2:0.4:0.1") == ["0.2", "0.3", "0.4"]
    assert len(parse_budgets("0.2:1.0:0.05")) == 17
    assert parse_budgets("4GiB,0.5") == ["4GiB", "0.5"]
    for text in ("0.2:1.0", "a:b:c", "0:1:0.1", "0.5:0.2:0.1", "0.2:1:0", "0.2:1.5:0.1"):
        with pytest.raises(BudgetError):
            parse_budgets(text)


def test_command(tmp_path):
    arguments = ["curve", "chain:8", "--budgets", "0.2:1.0:0.2", "--methods", "optimal,griewank"]
    done = recoup(*arguments, "-o", tmp_path / "c.json", "-o", tmp_path / "c.svg", "-o", tmp_path / "c.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "52.94 % (0 %)" in done.stdout
    assert "infeasible" in done.stdout
    data = json.loads((tmp_path / "c.json").read_text())
    assert [p["cost"] for p in data["points"] if p["method"] == "optimal"] == [17, 19, 21, 26, None]
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    shown = recoup(*arguments, "--json")
    assert json.loads(shown.stdout)["points"][0]["status"] == "optimal"
    assert recoup("curve", "chain:8", "-o", tmp_path / "c.pdf").returncode == 2
    assert recoup("curve", "chain:8", "--budgets", "0.1,0.2").returncode == 3


def test_reordering_is_never_worse_and_sometimes_better():
    for seed in range(5):
        graph = random_training(4, seed)
        for share in (0.9, 0.7):
            plain, other = (solve(graph, share, gap=0, time_limit=None, reorder=flag) for flag in (False, True))
            assert other.cost is None or simulate(graph, other.schedule).peak_bytes <= other.budget_bytes
            assert plain.cost is None or other.cost <= plain.cost
    b = GraphBuilder()  # two wide branches, listed side by side: one after the other needs half of the memory
    for name in "ab":
        b.op(f"{name}1", outputs={f"{name}": 8}, time=5)
    for name in "ab":
        b.op(f"{name}2", inputs=[name], outputs={f"{name}s": 1}, time=5)
    b.op("join", inputs=["as", "bs"], outputs={"j": 1}, time=1)
    graph = b.build()
    assert thrifty_order(graph) == [0, 2, 1, 3, 4]
    listed, moved = (solve(graph, 10, reorder=flag) for flag in (False, True))
    assert (moved.status, moved.cost, moved.peak_bytes) == ("optimal", 21, 10)
    assert listed.cost is None or listed.cost > moved.cost


def test_a_start_is_used():
    graph = chain(8)
    tight = solve(graph, 4, gap=0)
    again = solve(graph, 5, time_limit=0.001, start=tight.schedule)
    assert again.cost is None or again.cost <= 26
