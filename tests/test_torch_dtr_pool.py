"""What a live program's contents cost to lose."""

from functools import partial

from recoup.online.calls import Call
from recoup.online.contents import Content
from recoup.online.heuristics import make
from recoup.online.learned import Learned
from recoup.online.pool import Pool


def test_what_is_made_from_something_gone_costs_more_each_counted_once():
    """Each layer reads the two before it: there are billions of ways through them, no two of which cost the same."""
    pool, contents = Pool(partial(make, "dtr-eq")), []
    for key in range(50):
        call = Call("layer", lambda storages: None, contents[-2:], Learned(size=1, seconds=0.5**key))
        contents.append(Content(1, key, None, call, owner=None))
        pool.add(contents[-1], clock=0.0)
    for content in contents:
        content.call.known.passing = True  # as turns out later
    contents[0].resident = False
    pool.gone(contents[0])
    pool._tell()
    assert [pool._storages.cost[content.number] for content in contents] == [2 - 0.5**layer for layer in range(50)]
