import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from recoup import Graph, GraphBuilder, Plan, simulate
from recoup.cli import cli
from recoup.generators import chain, names

KEYS = [
    "status",
    "scope",
    "method",
    "cost",
    "base_cost",
    "overhead",
    "peak_bytes",
    "budget_bytes",
    "lower_bound",
    "gap",
    "seconds",
    "schedule",
]


def recoup(*arguments, env=None):
    """The real command, as a user runs it."""
    command = [sys.executable, "-m", "recoup", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}), timeout=120)


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "graph.json"
    chain(8).save(path)
    return path


def test_json_is_one_object_and_nothing_else(graph_file):
    done = recoup("solve", graph_file, "--budget", "4B", "--method", "checkmate", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert list(data) == KEYS
    assert data["status"] == "optimal"
    assert data["scope"] == "stage-once"
    assert (data["cost"], data["base_cost"], data["lower_bound"], data["gap"]) == (26, 17, 26, 0)
    assert data["overhead"] == pytest.approx(26 / 17 - 1)
    assert (data["peak_bytes"], data["budget_bytes"]) == (4, 4)
    assert simulate(chain(8), data["schedule"]).cost == 26


def test_json_without_a_schedule(graph_file):
    done = recoup("solve", graph_file, "--budget", "2B", "--json")
    assert (done.returncode, done.stderr) == (3, "")
    data = json.loads(done.stdout)
    assert list(data) == KEYS
    assert data["status"] == "infeasible"
    assert all(data[key] is None for key in ("cost", "overhead", "peak_bytes", "lower_bound", "gap", "schedule"))
    done = recoup("solve", "unet", "--budget", "0.9", "--method", "griewank", "--json")
    assert (done.returncode, json.loads(done.stdout)["status"]) == (3, "unknown")


def test_fractions_and_people(graph_file):
    done = recoup("solve", graph_file, "--budget", "0.5", "--method", "griewank")
    assert done.returncode == 0
    assert "5 B   (10 B with nothing recomputed)" in done.stdout
    assert "29.41 %" in done.stdout
    done = recoup("solve", graph_file, "--budget", "2B")
    assert done.returncode == 3
    assert "needs at least 3 B; 3 B works" in " ".join(done.stdout.split())


def test_plan_file(graph_file, tmp_path):
    path = tmp_path / "chain.plan.json"
    done = recoup("solve", graph_file, "--budget", "5B", "--method", "checkmate", "-o", path)
    assert done.returncode == 0
    assert Plan.load(path).peak_bytes == 5
    shown = recoup("show", path)
    assert shown.returncode == 0
    assert "checkmate, optimal, scope stage-once" in shown.stdout
    assert "overhead 29.41 %" in shown.stdout
    assert recoup("solve", path, "--budget", "4B", "--json").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve", "nowhere.json", "--budget", "1B"], "there is no file 'nowhere.json'"),
        (["solve", "chain:8", "--budget", "lots"], "'lots' is not a budget"),
        (["solve", "chain:8", "--budget", "7"], "a budget without a unit is a fraction between 0 and 1"),
        (["solve", "chain:x", "--budget", "7B"], "after the colon"),
        (["solve", "chain:8", "--budget", "7B", "--gap", "2"], "a gap of 2.0"),
        (["solve", "chain:8", "--budget", "7B", "-o", "no/such/folder/x.json"], "there is no folder"),
        (["solve", "chain:8", "--budget", "7B", "--method", "magic"], "'magic' is not one of"),
        (["solve", "chain:8"], "Missing option '--budget'"),
        (["max-batch", "chain:8", "--budget", "0.5"], "needs a budget in bytes"),
        (["show", "."], "cannot read '.'"),
        (["show", "a" * 300], "cannot read"),
        (["solve", "chain:8", "--budget", "7B", "-o", "."], "it is a folder"),
        (["solve", "chain:8", "--budget", "7B", "--seed", "-5"], "a seed of -5"),
        (["max-batch", "chain:8", "--budget", "9B", "--max-extra", "inf"], "max_extra"),
        (["max-batch", "chain:8", "--budget", "99999999TiB"], "more memory than there is"),
    ],
)
def test_bad_input_is_exit_code_2_and_says_why(arguments, message):
    done = recoup(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def test_broken_graph_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(chain(2).to_json()[:-20])
    done = recoup("solve", path, "--budget", "0.5", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: not JSON")


def test_names_that_look_like_markup_are_only_names(tmp_path):
    b = GraphBuilder("[/bold] \N{SNOWMAN}")
    b.op("[/x]", outputs={"y": 4}, time=1)
    b.build().save(tmp_path / "g.json")
    for arguments in (["show", tmp_path / "g.json"], ["solve", tmp_path / "g.json", "--budget", "2B"]):
        done = recoup(*arguments, env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode in (0, 3)
        assert "[/bold]" in done.stdout
        assert done.stderr == ""


def test_methods_and_help():
    runner = CliRunner()
    listed = runner.invoke(cli, ["methods"])
    assert listed.exit_code == 0
    assert "checkmate-unpartitioned" in listed.output
    for command in ([], ["solve"], ["show"], ["max-batch"], ["methods"]):
        shown = runner.invoke(cli, [*command, "--help"])
        assert shown.exit_code == 0
        assert "Usage:" in shown.output


@pytest.mark.parametrize("name", names())
def test_every_built_in_graph_can_be_shown(name):
    shown = CliRunner().invoke(cli, ["show", name])
    assert shown.exit_code == 0
    assert "no schedule needs less" in " ".join(shown.output.split())


def test_max_batch():
    arguments = ["max-batch", "chain:8", "--budget", "100B", "--method", "checkpoint-all", "--method", "griewank"]
    done = recoup(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert [r["batch"] for r in data["results"]] == [10, 25]
    assert "griewank" in recoup(*arguments).stdout
    assert recoup("max-batch", "chain:8", "--budget", "2B", "--method", "griewank").returncode == 3


def test_import_is_quick_and_light():
    code = (
        "import sys, time; began = time.perf_counter(); import recoup; seconds = time.perf_counter() - began;"
        "print(seconds); print(sorted({'torch', 'matplotlib', 'highspy', 'rich', 'click'} & set(sys.modules)))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.3
    assert runs[0].stdout.splitlines()[1] == "[]"


def test_graph_files_survive_the_round_trip(tmp_path):
    path = tmp_path / "x.json"
    chain(3).save(path)
    assert Graph.load(path) == chain(3)


def test_every_public_name_loads():
    import recoup as package

    assert sorted(package._MODULE) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        package.magic  # noqa: B018
