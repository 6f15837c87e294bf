"""What to add to a prediction, from what was measured: it closes in on what fits, in few attempts."""

from recoup.torch.corrections import Corrections


def test_they_close_in():
    """Every plan is 60 bytes below its prediction once it recomputes this much, and 50 above before."""
    corrections, planned, tried = Corrections(), 0, []
    while planned is not None:
        error = -60 if planned >= 36 else 50
        tried.append(planned)
        planned = corrections.next(planned, error, fits=error <= 0, margin=3)
    assert tried == [0, 53, 26, 39, 32, 35, 37]


def test_they_end_where_the_error_leads_nowhere():
    assert Corrections().next(0, -2, fits=True, margin=3) is None
    assert Corrections().next(0, -50, fits=True, margin=3) == -50


def test_they_follow_the_error_where_it_leads_somewhere_new():
    corrections = Corrections()
    assert corrections.next(0, 50, fits=False, margin=3) == 53
    assert corrections.next(53, 80, fits=False, margin=3) == 139
    assert corrections.next(139, -20, fits=True, margin=3) == 119
    assert corrections.next(119, 110, fits=True, margin=3) == 86  # that this fits is odd: what was over stays out
    assert corrections.next(86, 90, fits=False, margin=3) == 102


def test_they_grow_where_the_peak_does_not_see_them():
    """The peak is 1 over the budget until plans leave 40: with margins of 3, 6, 12, 24 that is soon."""
    corrections, planned, tried = Corrections(), 0, []
    while planned is not None and planned < 40:
        tried.append(planned)
        planned = corrections.next(planned, 1, fits=False, margin=3)
    assert tried == [0, 4, 11, 24]


def test_they_stay_below_what_was_refused():
    corrections = Corrections()
    assert corrections.refused(0, 40, margin=3) == 20
    assert corrections.next(20, 30, fits=False, margin=3) == 30
    assert corrections.refused(20, 30, margin=3) == 25
    assert corrections.next(25, 1, fits=False, margin=1) == 28


def test_where_little_is_left_to_take_off_all_of_it_is():
    assert Corrections().refused(0, 3, margin=3) == 1
    assert Corrections().refused(0, 2, margin=3) == 0
