import numpy as np
import pytest

from recoup.errors import BudgetError
from recoup.units import format_bytes, parse_bytes, resolve_budget


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("123B", 123),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("800MB", 800_000_000),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        (".5MiB", 2**19),
        ("0.1KB", 100),
    ],
)
def test_bytes(text, count):
    assert parse_bytes(text) == count
    assert resolve_budget(text, 10) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "6 apples", "6G", "-3GiB", "1e3GiB", "6GiB!", "six GiB", "nan", "0x10B", "½GiB"]
)
def test_nonsense(text):
    with pytest.raises(BudgetError, match="write bytes with a unit"):
        resolve_budget(text, 100)


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (0.4, 40),
        ("0.4", 40),
        (0.29, 29),
        ("1.0", 100),
        ("1", 100),
        (1.0, 100),
        (".5", 50),
        (100, 100),
        (7, 7),
        (None, None),
    ],
)
def test_budgets(budget, count):
    assert resolve_budget(budget, 100) == count


def test_numpy_numbers_are_numbers():
    assert resolve_budget(np.int64(7), 100) == 7
    assert resolve_budget(np.float64(0.5), 100) == 50


@pytest.mark.parametrize("budget", [0.0, 1.5, "2", "0", -1, float("nan"), float("inf"), True, [], 6e9])
def test_bad_budgets(budget):
    with pytest.raises(BudgetError):
        resolve_budget(budget, 100)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (6 * 2**30, "6 GiB"), (1234567, "1.177 MiB"), (2**50, "1024 TiB")],
)
def test_format(count, text):
    assert format_bytes(count) == text
