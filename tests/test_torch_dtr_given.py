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


def uses_what_is_let_go(x, _):
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


def lets_go_of_what_is_away(x, turn):
    """Something is evicted that is not read any more, and keeps what it was made from for as long as it is held."""
    first = x * 2
    second = first * 3
    third = second + 1
    fourth = third.exp()  # beside the first and the third
    del first, second
    fifth = fourth * 2
    return fifth.mean() / turn  # another number in each step


def needs_what_comes_back(x, _):
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


def needs_two_at_once(x, _):
    """Two come back before one operator; there is no room for what the first is made from beside the second."""
    half = x[: SIDE // 2] * 2
    whole = torch.cat([half, half])
    del half
    other = x.tanh()
    first = x.sigmoid()
    second = first * 2
    third = second[: SIDE // 2] + 1
    del second, third
    fourth = first[: SIDE // 2] + 1
    product = torch.dot(whole.view(-1), other.view(-1))
    return product + first.mean() + fourth.mean()


def holds_what_does_not_come_back(x, _):
    """Something is evicted that is not read any more, but held: what it was made from is not there for its sake."""
    first = x * 2
    second = first * 3
    third = second + 1
    fourth = first + third  # beside the first and the third
    del first
    fifth = fourth * 2
    sixth = fifth[: SIDE // 2] * 3  # beside three more, if the first is gone
    return torch.dot(third.view(-1), fourth.view(-1)) + fifth.mean() + sixth.mean()


@pytest.mark.parametrize(
    ("program", "again"),
    [
        (uses_what_is_let_go, {"5": ["1"]}),
        (lets_go_of_what_is_away, {}),
        (needs_what_comes_back, {"6": ["1"], "8": ["2"]}),
        (needs_two_at_once, {"7": ["1", "2"]}),
        (holds_what_does_not_come_back, {}),
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
            for op, before in again.items():
                at = steps.index(op)
                steps[at:at] = before
            return Schedule.of(self.graph, steps)

        def stop(self):
            pass

    monkeypatch.setattr(plans, "Planning", Given)
    x = torch.randn(SIDE, SIDE)
    with counted(monkeypatch), torch.no_grad():
        plain = program(x, STEPS)
        budget = counter().allocated() + int(3.55 * FULL) + plain.nbytes
        with recoup.dtr(budget, device="cpu") as run:
            alone = []
            for turn in range(1, STEPS + 1):
                result = program(x, turn)
                if run.report.followed == 0:
                    counter().reset_peak()
                alone.append(run._journal._watch.obeys)
            assert counter().peak() <= budget
            assert torch.equal(result, plain)
        assert run.report.evictions > 0
        assert all(alone[alone.index(True) :])  # it is never left
