"""Plans that are given, followed by Python and by C++: nothing is in memory for longer than planned."""

import pytest
import torch

import recoup
from recoup.online import plans
from recoup.schedule import Schedule
from tests.counting import counted, counter

pytestmark = pytest.mark.usefixtures("one_thread")

SIDE = 128
FULL = 4 * SIDE * SIDE
STEPS = 200


def uses_what_is_let_go(x):
    """A whole is made again from a half that the program does not hold any more."""
    half = x[: SIDE // 2] * 2
    whole = torch.cat([half, half])
    del half
    first = x.sigmoid()
    second = first + 1
    third = first * second  # held beside this: the half in place of the whole
    del first, second
    fourth = third + whole
    return fourth[: SIDE // 2] * 3  # beside the whole and two more, if the half is gone


def lets_go_of_what_is_away(x):
    """Something is evicted that is not read any more, and keeps what it was made from for as long as it is held."""
    first = x * 2
    second = first * 3
    third = second + 1
    fourth = third.exp()  # beside the first and the third
    del first, second
    fifth = fourth * 2
    return fifth.mean() * 4


def needs_what_comes_back(x):
    """Something is evicted when what it was made from is away, and that comes back before it."""
    half = x[: SIDE // 2] * 2
    whole = torch.cat([half, half])
    del half
    last = whole.tanh()
    first = last.sigmoid()
    second = first + 1
    third = first * second  # held beside these: the half in place of the whole and the last
    del first, second
    fourth = third + whole
    fifth = fourth[: SIDE // 2] * 3  # beside the whole and two more, if the half is gone
    del third, fourth, fifth
    return last.mean()


@pytest.mark.parametrize(
    ("program", "again"),
    [
        (uses_what_is_let_go, {"5": "1"}),
        (lets_go_of_what_is_away, {}),
        (needs_what_comes_back, {"6": "1", "8": "2"}),
    ],
)
def test_no_more_than_planned(program, again, monkeypatch):
    """The budget is that of the plan: there is no room for half a tensor more."""

    class Given:
        done = True

        def __init__(self, graph, budget, seconds, gap):
            self.graph, self.budget, self.seconds = graph, budget, seconds

        def schedule(self):
            steps = [str(step) for step in Schedule.default(self.graph).steps()]
            for before, one in again.items():
                steps.insert(steps.index(before), one)
            return Schedule.of(self.graph, steps)

        def stop(self):
            pass

    monkeypatch.setattr(plans, "Planning", Given)
    x = torch.randn(SIDE, SIDE)
    with counted(monkeypatch), torch.no_grad():
        plain = program(x)
        budget = counter().allocated() + int(3.55 * FULL) + plain.nbytes
        with recoup.dtr(budget, device="cpu") as run:
            alone = []
            for _ in range(STEPS):
                result = program(x)
                if run.report.followed == 0:
                    counter().reset_peak()
                alone.append(run._journal._watch.obeys)
            assert counter().peak() <= budget
            assert torch.equal(result, plain)
        assert run.report.evictions > 0
        assert all(alone[alone.index(True) :])  # it is never left
