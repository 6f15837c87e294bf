"""The DTR runtime's words: what it refuses, warns of and reports."""

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupWarning
from recoup.online.report import Report
from recoup.torch.memory import resident_bytes
from tests.torch_helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread", "seen")

CPU = torch.device("cpu")
ROOM = "64GiB"


def dtr(budget, **options):
    return recoup.dtr(budget, device="cpu", **options)


def test_out_of_memory_says_what_was_needed():
    x = torch.zeros(1024)
    with dtr(resident_bytes(CPU) + 6000):
        y = x + 1
        with pytest.raises(recoup.BudgetError, match=r"aten\.mul needs 4.062 KiB more.*would be enough here"):
            y.mul(2)
    assert (x + 1).sum().item() == 1024  # the block is closed


def test_more_than_the_budget_is_there_already():
    x = torch.zeros(1024)
    with pytest.raises(recoup.BudgetError, match="are allocated already"):
        dtr(x.nbytes - 1).__enter__()


@pytest.mark.parametrize("budget", [0.5, "0.5", None])
def test_a_budget_must_be_bytes(budget):
    with pytest.raises(recoup.BudgetError, match="give bytes"):
        dtr(budget)


def test_a_budget_that_means_nothing():
    with pytest.raises(recoup.BudgetError, match=r"no unit 'parsec': write bytes with a unit, .* or 'auto'$"):
        dtr("12parsec")


def test_a_limit_below_one():
    with pytest.raises(recoup.SettingError, match="1 or more"):
        dtr(ROOM, limit=0)


def test_no_such_heuristic():
    with pytest.raises(recoup.MethodError, match="no heuristic"):
        dtr(ROOM, heuristic="magic")


def test_thrashing_warns_with_a_better_budget():
    x = torch.zeros(4096)

    def up_and_down():
        with torch.no_grad(), dtr(resident_bytes(CPU) + 4 * 16384, limit=2.0):
            kept = [x]
            for _ in range(60):
                kept.append(kept[-1] + 1)
            for number in range(60, 0, -1):
                kept[number].sum().item()
            del kept

    with pytest.warns(RecoupWarning, match=r"operators take more than 2 times .* try "):
        up_and_down()


def test_what_was_repeated_for_want_of_knowledge_is_no_thrashing():
    report = Report(1024, base_seconds=1.0, remat_seconds=9.0, rematerializations=200)
    report.excuse()
    report.base_seconds, report.remat_seconds, report.rematerializations = 2.0, 10.5, 301
    report.check(3.0)
    report.remat_seconds = 11.5
    with pytest.warns(RecoupWarning, match="more than 3 times"):
        report.check(3.0)


def test_the_report_reads_well():
    x = torch.zeros(1024)
    with dtr(ROOM) as run:
        (x + 1).sum().item()
    assert "0 evictions, 0 operators repeated" in str(run.report)


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq", "dtr-local", "lru", "largest", "random", "msps", "e-star"])
def test_every_heuristic_gives_the_same_bits(heuristic):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
    x = torch.randn(128, 32)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with dtr(resident_bytes(CPU) + 7 * 16384, heuristic=heuristic) as run:
        model(x).sum().backward()
    assert run.report.evictions > 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("device", "message"), [("nonsense", "is no device"), ("meta", "only CUDA"), ("cuda", "no CUDA device here")]
)
def test_no_such_device(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(recoup.SettingError, match=message):
        recoup.dtr(ROOM, device=device)
