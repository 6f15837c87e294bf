"""Does a program repeat itself? Operators in order, and the step that they are repetitions of."""

from __future__ import annotations

import numpy as np

_WINDOW = 16  # operators that must agree before whole steps are compared
_FIRST_LOOK = 512  # operators before the first look; each later look waits until there is an eighth more
_LONGEST = 2**20  # operators that are remembered
_SAME = 0.01  # of the swing in memory: two steps may differ by so much in what they hold
_NEAR = 0.1  # of the swing: a step comes so near to its lowest and its highest point, a loop inside one does not


class Repeats:
    """Told of every operator, by number, and of what the program holds when it comes."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._numbers: list[int] = []
        self._held: list[int] = []
        self._look_at = _FIRST_LOOK
        self._cuts = 0

    def add(self, number: int, held: int) -> None:
        """The next operator."""
        if len(self._numbers) == _LONGEST:
            self._forget()
        self._numbers.append(number)
        self._held.append(held)

    def cut(self) -> None:
        """What comes next does not follow on what came before; but a step is still as large as it was."""
        if self._numbers and self._numbers[-1] >= 0:
            self._cuts += 1
            self.add(-self._cuts, self._held[-1])

    def find(self) -> tuple[list[int], int] | None:
        """The operators of one step and which of them comes next, if what was seen last was one step twice.

        The step begins where the program holds least.
        """
        count = len(self._numbers)
        if count < self._look_at:
            return None
        self._look_at = count + max(_FIRST_LOOK, count // 8)
        numbers, held = np.array(self._numbers), np.array(self._held)
        lately = held[count // 2 :]  # the first steps may hold less, or more
        lowest, highest = lately.min(), lately.max()
        swing = highest - lowest
        ends = np.flatnonzero(numbers[:-1] == numbers[-1])
        ends = ends[ends >= _WINDOW]
        for back in range(1, _WINDOW):
            ends = ends[numbers[ends - back] == numbers[-1 - back]]
        for end in ends[::-1]:
            length = count - 1 - int(end)
            if 2 * length > count:
                return None
            last = held[-length:]
            if last.max() < highest - _NEAR * swing or last.min() > lowest + _NEAR * swing:
                continue
            if abs(held[end] - held[-1]) > _SAME * swing:
                continue
            if np.array_equal(numbers[-length:], numbers[-2 * length : -length]):
                least = int(last.argmin())
                return np.roll(numbers[-length:], -least).tolist(), (length - least) % length
        return None
