"""``python -m recoup``: the same as the command ``recoup``."""

from recoup.cli import main

main()
