"""The DTR simulator against numbers known from the paper and from published code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dtr import main as benchmark
from benchmarks.dtr import skipping
from benchmarks.growth import total
from benchmarks.objects import MEASURES, ObjectRun
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from recoup.cli import cli
from recoup.errors import LogError, MethodError
from recoup.online import heuristics, logs
from recoup.online.programs import adversary, linear_network
from recoup.online.replay import replay
from recoup.online.simulation import baseline_peak, simulate_log
from recoup.online.simulator import OutOfMemory, Simulator, Thrashing

LOGS = Path(__file__).parents[2] / "shared" / "logs"


@pytest.mark.parametrize(
    ("length", "budget", "heuristic", "again"), [(200, 30, "e-star", 212), (200, 30, "dtr", 173), (64, 8, "dtr", 102)]
)
@pytest.mark.parametrize("deallocation", ["banish", "eager"])
def test_linear_network(length: int, budget: int, heuristic: str, again: int, deallocation: str) -> None:
    run = Simulator(budget, heuristics.make(heuristic), deallocation)  # type: ignore[arg-type]
    linear_network(run, length)
    assert run.rematerializations == again
    assert run.total_cost == 2 * length + again
    assert run.peak <= budget


@pytest.mark.parametrize(("heuristic", "per_layer"), [("e-star", 4.0), ("dtr", 3.1)])
def test_linear_growth_of_theorem_3_1(heuristic: str, per_layer: float) -> None:
    """With room for 2 * ceil(sqrt(N)) the operators run stay within a constant times N."""
    for length in (64, 100, 400, 1024, 4096):
        assert total(length, heuristic) <= per_layer * length


def test_growth_is_printed_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "growth.svg"
    done = CliRunner().invoke(benchmark, ["growth", "--longest", "64", "-o", str(output)])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1].split() == ["64", "16", "202", "3.156", "177", "2.766"]
    assert "</svg>" in output.read_text()


def test_speed_is_what_the_benchmark_does_by_default(tmp_path: Path) -> None:
    path = tmp_path / "step.log"
    path.write_text("\n".join(logs.format_log(skipping(60))) + "\n")
    done = CliRunner().invoke(benchmark, [str(path), "--heuristics", "dtr-eq,lru", "--rounds", "1"])
    assert done.exit_code == 0
    assert "dtr-eq" in done.output


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq", "dtr-local", "e-star", "lru", "msps"])
def test_adversary(heuristic: str) -> None:
    run = Simulator(8, heuristics.make(heuristic), "none")
    adversary(run, 256, 8)
    assert run.total_cost == 4224


def test_what_is_banished_does_not_come_back_with_a_sibling() -> None:
    run = Simulator(3, heuristics.make("lru"), "banish")
    x = run.constant(0)
    a, b = run.call([x], [1, 1], 1)
    run.release(a)
    run.call([x], [2], 1)
    run.call([x], [1], 1)
    assert not run.defined[b]
    run.call([b], [0], 1)
    assert run.defined[b]
    assert not run.defined[a]
    assert run.peak == 3  # while the operator that makes both runs, there are both


def play(run: Simulator | ObjectRun, program: Sequence[Any]) -> None:
    """Constants are numbers of bytes, releases a tensor in a list; the rest are calls."""
    for item in program:
        if isinstance(item, int):
            run.constant(item)
        elif isinstance(item, list):
            run.release(*item)
        else:
            run.call(*item)
    run.finish()


def test_what_is_banished_is_not_asked_for_again_by_a_view() -> None:
    """A storage that is there may have a view that is not."""
    program = [0, 2, [0], ([1], [0, 1, 2], 1, [1, None, None]), ([2, 2, 3], [0, 0], 2, [None, 3]), ([3, 3, 5], [1], 1)]
    program += [([4], [2, 2], 2), ([8, 8, 9], [4], 3), [1], ([7, 10], [1, 0, 3], 2), ([12], [2, 2], 3), [10], [9]]
    program += [([11], [4], 3), [2], ([8], [4, 0, 2], 1, [None, 8, None])]
    with pytest.raises(OutOfMemory):  # and did not end
        play(Simulator(19, heuristics.make("dtr"), "banish"), program)


def test_an_operator_that_waits_for_a_view_of_what_is_there() -> None:
    """That is in the pool meanwhile, and sees what is yet to be made."""
    program = [
        2,
        ([0], [0], 3, [0]),
        ([1, 1], [0, 0], 1, [1, 1]),
        ([2], [2, 1], 3),
        ([5, 3], [3, 0], 3, [None, 3]),
        [4],
    ]
    program += [([2], [0, 3, 0], 3, [2, None, 2]), ([9, 9, 2], [0, 0], 4, [9, 9]), ([7, 11], [4, 4], 4)]
    program += [([11, 14, 7], [0, 3], 1, [7, None]), ([5], [2], 1), ([17, 10, 5], [3, 4], 4), ([14, 9], [2], 4)]
    program += [([8, 2], [3], 0), ([20], [4], 2), ([16, 21, 14], [2, 0], 2, [None, 16])]
    for run in (Simulator(24, heuristics.make("e-star"), "none"), ObjectRun(24, "e-star", eager=False)):
        with pytest.raises(OutOfMemory):
            play(run, program)
        assert (run.total_cost, run.evictions) == (48, 15)


def test_chain_of_100_000() -> None:
    run = Simulator(None, heuristics.make("lru"))
    [last] = run.call([], [1], 1)
    for _ in range(100_000):
        [following] = run.call([last], [1], 1)
        run.release(last)
        last = following
    run.release(last)
    [_] = run.call([last], [1], 1)  # brings back the whole chain, one after the other
    assert run.total_cost == 2 * 100_001 + 1


@pytest.mark.parametrize(
    ("log", "heuristic", "overhead"),
    [
        ("resnet32-56", "dtr", 0.107),
        ("unet-6", "dtr", 0.159),
        ("transformer-10", "dtr", 0.058),
        ("treelstm-6", "dtr", 0.123),
        ("treelstm-6", "dtr-eq", 0.127),
    ],
)
def test_published_overheads(log: str, heuristic: str, overhead: float) -> None:
    path = LOGS / f"{log}.log.gz"
    if not path.exists():
        pytest.skip("the published logs are not part of the repository")
    outcome = simulate_log(logs.read_log(path), 0.5, heuristic)
    assert outcome.overhead == pytest.approx(overhead, abs=0.0005)
    assert outcome.peak_bytes <= (outcome.budget_bytes or 0)


def chain_log(length: int) -> list[logs.Instruction]:
    """y1 = f(x), y2 = f(y1), ..., each kept until the backward reads it."""
    items: list[logs.Instruction] = [logs.Constant("x", 4)]
    names = ["x"]
    for i in range(length):
        items.append(logs.Call("f", (names[-1],), (f"y{i}",), (4,), (-1,), 10))
        names.append(f"y{i}")
    items.append(logs.Call("g", (names[-1],), ("g",), (4,), (-1,), 10))
    for name in reversed(names[1:]):
        items += [logs.Mutate("add_", ("g", name), (0,), 5), logs.Release(name)]
    return items


def test_baseline_and_overhead_of_a_chain() -> None:
    log = chain_log(4)
    assert baseline_peak(log) == 4 * 7  # x, four activations, the gradient and its mutated copy
    outcome = simulate_log(log, 20, "lru")
    assert outcome.status == "ok"
    assert outcome.base_cost == 70
    assert outcome.total_cost == outcome.base_cost + outcome.remat_cost
    assert outcome.rematerializations > 0
    assert outcome.peak_bytes <= 20
    assert simulate_log(log, 8).status == "oom"
    assert simulate_log(log, 20, "lru", limit=1.0).status == "thrash"
    assert simulate_log(log).overhead == 0


@given(st.data())
def test_memory_is_what_is_resident_and_never_over_budget(data: st.DataObject) -> None:
    """Random programs with views, several outputs and releases: the books balance, whatever the heuristic."""
    name = data.draw(st.sampled_from(list(heuristics.HEURISTICS)))
    how = data.draw(st.sampled_from(["eager", "banish", "none"]))
    budget = data.draw(st.integers(6, 40))
    run = Simulator(budget, heuristics.make(name), how)
    live = [run.constant(1)]
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            if live and data.draw(st.booleans()) and len(live) > 1:
                run.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
            else:
                inputs = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3)) if live else []
                sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
                aliases = [data.draw(st.sampled_from([None, *inputs])) for _ in sizes]
                live += run.call(inputs, sizes, data.draw(st.integers(0, 5)), aliases)
            storages = run.storages
            resident = sum(int(storages.size[s]) for s in range(storages.count) if storages.resident[s])
            assert run.memory == resident <= budget
            assert all(lock == 0 for lock in run.locks)
            pool = set(storages.pool)
            assert pool == {s for s in range(storages.count) if run._evictable(s) and not run.banished[s]}
        run.finish()
        assert all(run.defined[tensor] for tensor in live)
    except (OutOfMemory, Thrashing):
        pass
    assert run.peak <= budget


@given(st.data())
def test_agrees_with_the_definitions(data: st.DataObject) -> None:
    """A simulator with an object a storage, which remembers nothing between two choices, does the same at each step."""
    name = data.draw(st.sampled_from(list(MEASURES)))
    eager = data.draw(st.booleans())
    budget = data.draw(st.integers(5, 25))
    run = Simulator(budget, heuristics.make(name), "eager" if eager else "none", 20)
    slow = ObjectRun(budget, name, eager, 20)
    live = [run.constant(1)]
    slow.constant(1)
    try:
        for _ in range(data.draw(st.integers(1, 40))):
            if len(live) > 1 and data.draw(st.integers(0, 3)) == 0:
                gone = live.pop(data.draw(st.integers(0, len(live) - 1)))
                run.release(gone)
                slow.release(gone)
            else:
                inputs = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3))
                sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
                aliases = [data.draw(st.sampled_from([None, None, *inputs])) for _ in sizes]
                cost = data.draw(st.integers(0, 9))
                with _same_end(slow, inputs, sizes, cost, aliases):
                    live += run.call(inputs, sizes, cost, aliases)
            assert [run.clock, run.memory, run.peak, run.evictions, run.rematerializations] == [
                slow.clock, slow.memory, slow.peak, slow.evictions, slow.rematerializations,
            ]  # fmt: skip
            assert run.defined == [tensor.defined for tensor in slow.tensors]
    except (OutOfMemory, Thrashing):
        pass


@contextmanager
def _same_end(slow: ObjectRun, *call: Any) -> Iterator[None]:
    """The straightforward simulator ends this call as the other does: well, out of memory, or thrashing."""
    try:
        yield
    except (OutOfMemory, Thrashing) as problem:
        with pytest.raises(type(problem)):
            slow.call(*call)
        raise
    slow.call(*call)


def test_agrees_with_the_definitions_on_a_long_program() -> None:
    """Long enough for components to merge and for arrays to grow."""
    log = skipping(120)
    for name in MEASURES:
        outcome = simulate_log(log, 0.4, name, limit=None)
        slow = ObjectRun(outcome.budget_bytes, name)
        replay(log, slow)
        assert outcome.rematerializations > 0
        assert (outcome.total_cost, outcome.evictions) == (slow.total_cost, slow.evictions)


def test_log_survives_writing_and_reading(tmp_path: Path) -> None:
    log = [
        *chain_log(3),
        logs.Copy("h", "g"),
        logs.CopyFrom("h", "x"),
        logs.Call("split", ("x",), ("a", "b"), (0, 0), (0, 0), 1),
        logs.Annotate("END"),
    ]
    path = tmp_path / "step.log"
    path.write_text("\n".join(logs.format_log(log)) + "\n")
    assert logs.read_log(path) == log


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"INSTRUCTION":"JUMP"}', "line 1 has the instruction 'JUMP'"),
        ('{"INSTRUCTION":"CONSTANT","NAME":"x"}', "the log ends where the MEMORY of 'x' should be"),
        (
            '\n{"INSTRUCTION":"CONSTANT","NAME":"x"}\n{"INSTRUCTION":"RELEASE","NAME":"x"}',
            "line 3 should be the MEMORY",
        ),
        ('{"INSTRUCTION":"CALL","ARGS":[],"RESULT":["x"],"TIME":"soon"}', "line 1 has no TIME"),
        ('{"INSTRUCTION":"CALL","ARGS":"x","RESULT":[],"TIME":"1"}', "line 1 has no ARGS"),
        ('{"INSTRUCTION":"MUTATE","ARGS":["x"],"MUTATE":[1],"TIME":"1"}', "line 1 has no MUTATE"),
    ],
)
def test_broken_log(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.log"
    path.write_text(text)
    with pytest.raises(LogError, match=says.replace("[", r"\[")):
        logs.read_log(path)


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "step.log"
    path.write_text("\n".join(logs.format_log(chain_log(4))) + "\n")
    done = CliRunner().invoke(cli, ["dtr", str(path), "--budget", "20B", "--heuristic", "lru", "--json"])
    data = json.loads(done.output)
    assert done.exit_code == 0
    assert data["status"] == "ok"
    assert data["budget_bytes"] == 20
    assert data["overhead"] == data["total_cost"] / data["base_cost"] - 1
    assert CliRunner().invoke(cli, ["dtr", str(path), "--budget", "8B"]).exit_code == 3
    assert CliRunner().invoke(cli, ["dtr", str(path), "--budget", "20B", "--heuristic", "best"]).exit_code == 2
    with pytest.raises(LogError, match=r"there is no file 'missing.log'; .with recoup.record"):
        logs.read_log("missing.log")


def test_unknown_heuristic() -> None:
    with pytest.raises(MethodError, match="dtr-local"):
        heuristics.make("best")


def test_measures_can_be_turned_off() -> None:
    log = skipping(60)
    for kind in ("dtr", "dtr-eq", "dtr-local"):
        off = simulate_log(log, 0.5, kind, without=("cost", "size"), limit=None)
        assert off.total_cost == simulate_log(log, 0.5, "lru", limit=None).total_cost
        assert off.heuristic == f"{kind} without cost, size"
        off = simulate_log(log, 0.5, kind, without=("cost", "staleness"), limit=None)
        assert off.total_cost == simulate_log(log, 0.5, "largest", limit=None).total_cost
    off = simulate_log(log, 0.5, "dtr", without=("staleness",), limit=None)
    assert off.total_cost == simulate_log(log, 0.5, "e-star", limit=None).total_cost
    assert simulate_log(log, 0.5, "dtr", without=heuristics.MEASURES, limit=None).status == "ok"


@pytest.mark.parametrize(
    ("name", "without", "says"),
    [
        ("lru", "staleness", "lru looks at staleness alone"),
        ("largest", "cost", "largest does not look at cost"),
        ("e-star", "staleness", "e-star does not look at staleness"),
        ("random", "size", "random does not look at size"),
        ("dtr", "age", "there is no measure 'age'"),
    ],
)
def test_measures_that_cannot_be_turned_off(name: str, without: str, says: str) -> None:
    with pytest.raises(MethodError, match=says):
        heuristics.make(name, [without])


def test_measures_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "step.log"
    path.write_text("\n".join(logs.format_log(chain_log(4))) + "\n")
    given = ["dtr", str(path), "--budget", "20B"]
    done = CliRunner().invoke(cli, [*given, "--without", "staleness", "--without", "size", "--without", "cost"])
    assert done.exit_code == 0
    assert "dtr without staleness, size, cost" in done.output
    done = CliRunner().invoke(cli, [*given, "--heuristic", "lru", "--without", "staleness"])
    assert isinstance(done.exception, MethodError)
    assert CliRunner().invoke(cli, [*given, "--without", "age"]).exit_code == 2
