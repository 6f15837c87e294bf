"""Algorithm 1's execution plan as a view of a schedule: what to compute, and what to drop, in order.

Each value instance gets a register of its own. Frees come as early as they can: right after the last use, or right
after the op itself if nobody reads what it made (section 4.9's code motion).
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.judge import simulate
from recoup.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Compute:
    """Run ``op``; each output goes into a register. ``over`` is the register an in-place op overwrites."""

    registers: tuple[int, ...]
    op: str
    implementation: str = ""
    over: int | None = None

    def __str__(self) -> str:
        left = ", ".join(f"%{r}" for r in self.registers)
        how = f" by {self.implementation}" if self.implementation else ""
        where = f" over %{self.over}" if self.over is not None else ""
        return (f"{left} = " if left else "") + f"compute {self.op}{how}{where}"


@dataclass(frozen=True, slots=True)
class Deallocate:
    """Drop what a register holds."""

    register: int

    def __str__(self) -> str:
        return f"deallocate %{self.register}"


def statements(schedule: Schedule) -> list[Compute | Deallocate]:
    """The execution plan of a valid schedule; ``str`` of each statement is a line of the paper's plan."""
    graph, a = schedule.graph, schedule.graph.arrays
    alive = simulate(graph, schedule).instances
    ends: dict[tuple[int, int], int] = {
        (value, first): last
        for value, first, last in zip(alive.value.tolist(), alive.first.tolist(), alive.last.tolist(), strict=True)
    }
    dying: list[list[int]] = [[] for _ in range(len(schedule))]
    holds: dict[int, int] = {}  # value to the register of its latest instance
    program: list[Compute | Deallocate] = []
    count = 0
    for step, kernel in enumerate(schedule.kernels.tolist()):
        op = graph.ops[a.op[kernel]]
        over = holds.get(int(a.overwritten[kernel]))
        outputs = a.outputs[kernel].tolist()
        registers = tuple(range(count, count + len(outputs)))
        count += len(outputs)
        for value, register in zip(outputs, registers, strict=True):
            last = ends[value, step]
            double = a.required[value] and value in holds
            if double or not a.required[value]:
                dying[last].append(register)
            if not double:
                holds[value] = register
        choice = kernel - int(a.first_kernel[a.op[kernel]])
        name = op.implementations[choice].name if choice else ""
        program.append(Compute(registers, op.id, name, over))
        program += [Deallocate(r) for r in sorted(dying[step]) if r != over]
    return program
