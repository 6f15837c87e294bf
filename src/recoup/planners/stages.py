"""Checkmate's integer program (MLSys 2020, section 4): one block of variables per stage.

    R[t, i]        op i runs in stage t
    S[t, d]        value d is carried from stage t - 1 into stage t
    FREE[t, d, k]  value d is freed right after op k ran in stage t
    U[t, k]        memory while op k runs in stage t, or would

The paper's nodes have one output. Here R is per op and S and FREE per value, which is the same program when every op
has one output, and keeps lifetimes exact when it has several: nothing is merged. Also beyond the paper: workspaces
count where the op runs, required outputs are carried to the end, ops marked ``once`` never run again, and in-place
first implementations destroy what they overwrite. Optional ops are left out.

Variables that no optimum uses are not made (section 4.8): running an op that nothing still to come depends on, and
FREE[t, k, k] for an op with one output, whose rerun would have no reader.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from recoup.graph import Graph
from recoup.judge import Simulation
from recoup.schedule import Schedule
from recoup.solvers.program import Floats, Program
from recoup.views.stage_matrices import stages


@dataclass
class StageProgram:
    """The program of one graph and budget, with the column numbers of its variables."""

    graph: Graph
    budget: int | None
    partitioned: bool
    stopped: Callable[[], bool] = lambda: False  # checked while building: a large program takes long to write down
    program: Program = field(default_factory=Program)
    R: dict[tuple[int, int], int] = field(default_factory=dict)
    S: dict[tuple[int, int], int] = field(default_factory=dict)
    FREE: dict[tuple[int, int, int], int] = field(default_factory=dict)
    U: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        a = self.graph.arrays
        self.nodes = np.flatnonzero(a.mandatory).tolist()  # ops of the program, in execution order
        self.kernel = {i: int(a.first_kernel[i]) for i in self.nodes}
        self.reads = {i: a.inputs[k].tolist() for i, k in self.kernel.items()}
        self.writes = {i: a.outputs[k].tolist() for i, k in self.kernel.items()}
        self.users: dict[int, list[int]] = defaultdict(list)  # USERS of section 4.4, per value, in order
        for i in self.nodes:
            for d in self.reads[i]:
                self.users[d].append(i)
        self.byte_unit = _unit([int(b) for b in a.bytes] + a.workspace.tolist(), self._room() or 1)
        self.time_unit = _time_unit([a.times[k] for k in self.kernel.values()])
        self.stage = {i: t for t, i in enumerate(self.nodes)}
        self._columns()
        self._correctness()
        if self.budget is not None:
            self._memory()

    # Which variables there are ---------------------------------------------------------------------------------

    def _columns(self) -> None:
        a, p = self.graph.arrays, self.program
        for t in range(len(self.nodes)):
            if self.stopped():
                return
            useful = self._useful(t) if self.partitioned else set(self.nodes)
            for position, i in enumerate(self.nodes[: t + 1] if self.partitioned else self.nodes):  # (8c)
                first = self.partitioned and position == t
                again = not self.partitioned or (i in useful and not a.once[i])
                if first or again:
                    cost = a.times[self.kernel[i]] / self.time_unit
                    self.R[t, i] = p.column(cost, lower=float(first))  # (8a)
                if first or t == 0:
                    continue  # (8b), (1d)
                for d in self.writes[i]:
                    held = self.partitioned and bool(a.required[d])
                    if held or not self.partitioned or self._has_use(d, t, useful):
                        self.S[t, d] = p.column(lower=float(held))

    def _useful(self, t: int) -> set[int]:
        """Ops that some first run in stage ``t`` or later still depends on, directly or not."""
        useful: set[int] = set()
        producer = self.graph.arrays.producer
        for i in reversed(self.nodes):
            if i in useful or i >= self.nodes[t]:
                useful.update(int(producer[d]) for d in self.reads[i])
        return useful

    def _has_use(self, d: int, t: int, useful: set[int]) -> bool:
        return any(k >= self.nodes[t] or k in useful for k in self.users[d])

    # The rows ----------------------------------------------------------------------------------------------------

    def _correctness(self) -> None:
        a, p = self.graph.arrays, self.program
        for (t, j), run in self.R.items():  # (1b): what op j reads is computed in this stage or carried into it
            for d in self.reads[j]:
                p.row([*self._made(t, d), (run, -1.0)], lower=0.0)
            overwritten = int(a.overwritten[self.kernel[j]])
            if overwritten >= 0:
                self._destroy(t, j, overwritten)
        for (t, d), carried in self.S.items():  # (1c): what is carried was computed or carried before
            if self.partitioned and t - 1 == self.stage[int(a.producer[d])]:
                continue  # made by the first run at the end of the stage before
            p.row([*self._made(t - 1, d), (carried, -1.0)], lower=0.0)
        if self.partitioned:
            return
        for i in self.nodes:  # (1e): every op that nobody reads runs, and with it all it depends on
            runs = [(self.R[t, i], 1.0) for t in range(len(self.nodes))]
            if not any(self.users[d] for d in self.writes[i]):
                p.row(runs, lower=1.0)
            if a.once[i]:
                p.row(runs, upper=1.0)
        for (t, d), carried in self.S.items():  # a required output stays once it is there
            if a.required[d]:
                before = self.S.get((t - 1, d))
                if before is not None:
                    p.row([(carried, 1.0), (before, -1.0)], lower=0.0)
                p.row([(carried, 1.0), (self.R[t - 1, int(a.producer[d])], -1.0)], lower=0.0)

    def _made(self, t: int, d: int) -> list[tuple[int, float]]:
        run = self.R.get((t, int(self.graph.arrays.producer[d])))
        carried = self.S.get((t, d))
        return [(column, 1.0) for column in (run, carried) if column is not None]

    def _destroy(self, t: int, k: int, d: int) -> None:
        """Once op k wrote over value d, no later op of the stage and no later stage has it."""
        run = self.R[t, k]
        later = [self.R[t, j] for j in self.users[d] if j > k and (t, j) in self.R]
        if (t + 1, d) in self.S:
            later.append(self.S[t + 1, d])
        for column in later:
            self.program.row([(run, 1.0), (column, 1.0)], upper=1.0)

    def _memory(self) -> None:
        """(2), (3), (7a) to (7c), and U <= budget. ``before`` is what op k finds in use: U less the frees before it."""
        a, p = self.graph.arrays, self.program
        room = (self._room() or 0) / self.byte_unit
        size = a.bytes / self.byte_unit
        for t in range(len(self.nodes)):
            if self.stopped():
                return
            columns = [i for i in self.nodes if (t, i) in self.R]
            before = [(column, size[d]) for d, column in self._carried(t)]
            for k in columns:
                run = self.R[t, k]
                use = self.U[t, k] = p.column(upper=room, integer=False)
                inplace = int(a.overwriting[self.kernel[k]])
                made = sum(size[d] for d in self.writes[k] if d != inplace)
                p.row([*before, (run, made), (use, -1.0)], lower=0.0, upper=0.0)  # (2), (3)
                workspace = float(a.workspace[self.kernel[k]]) / self.byte_unit
                if workspace:
                    p.row([(use, 1.0), (run, workspace)], upper=room)
                before = [(use, 1.0)]
                for d in self._freeable(t, k):  # (4)
                    before.append((self._free(t, d, k), -size[d]))

    def limit_cost(self, limit: float) -> None:
        """Equation (10): the total cost stays within ``limit``."""
        cost = self.graph.arrays.times
        terms = [(column, cost[self.kernel[i]] / self.time_unit) for (_, i), column in self.R.items()]
        self.program.row(terms, upper=limit / self.time_unit)

    def minimise_peak(self) -> None:
        """Replace the objective: the largest memory while any op runs, instead of the time they take."""
        p = self.program
        p.cost = [0.0] * len(p.cost)
        peak = p.column(1.0, upper=np.inf, integer=False)
        for (t, k), use in self.U.items():
            workspace = float(self.graph.arrays.workspace[self.kernel[k]]) / self.byte_unit
            p.row([(peak, 1.0), (use, -1.0), (self.R[t, k], -workspace)], lower=0.0)

    def _carried(self, t: int) -> list[tuple[int, int]]:
        made = (d for i in self.nodes for d in self.writes[i])
        return [(d, self.S[t, d]) for d in made if (t, d) in self.S]

    def _freeable(self, t: int, k: int) -> list[int]:
        """DEPS[k] of (4), and k's own outputs where running k may make one that nobody wants (section 4.8)."""
        required = self.graph.arrays.required
        gone = int(self.graph.arrays.overwritten[self.kernel[k]])
        values = [d for d in self.reads[k] if not required[d] and d != gone]
        for d in self.writes[k]:
            if required[d]:
                if (t, d) in self.S:
                    values.append(d)  # the double of a required output
            elif len(self.writes[k]) > 1 or not self.users[d]:
                values.append(d)
        return values

    def _free(self, t: int, d: int, k: int) -> int:
        p = self.program
        free = p.column()  # (7a)
        self.FREE[t, d, k] = free
        run = self.R[t, k]
        if self.graph.arrays.required[d]:  # free = run and carried
            carried = self.S[t, d]
            p.row([(run, 1.0), (free, -1.0)], lower=0.0)
            p.row([(carried, 1.0), (free, -1.0)], lower=0.0)
            p.row([(free, 1.0), (run, -1.0), (carried, -1.0)], lower=-1.0)
            return free
        hazards = [(column, 1.0) for column in self._hazards(t, d, k)]
        kappa = len(hazards) + 1.0
        p.row([(run, -1.0), *hazards, (free, 1.0)], lower=0.0)  # (7b): 1 - free <= hazards
        p.row([(run, -1.0), *hazards, (free, kappa)], upper=kappa - 1.0)  # (7c): kappa (1 - free) >= hazards
        return free

    def _hazards(self, t: int, d: int, k: int) -> list[int]:
        """The columns of num_hazards(t, d, k) besides 1 - R[t, k]: carried on, or read later in the stage."""
        later = [self.R[t, j] for j in self.users[d] if j > k and (t, j) in self.R]
        if (t + 1, d) in self.S:
            later.append(self.S[t + 1, d])
        return later

    def _room(self) -> int | None:
        return None if self.budget is None else self.budget - self.graph.resident_bytes

    # From and to schedules ----------------------------------------------------------------------------------------

    def schedule(self, x: Floats) -> Schedule:
        """The schedule of an integral point: R row by row (Algorithm 1)."""
        runs = sorted(key for key, column in self.R.items() if x[column] > 0.5)
        return Schedule.of_ops(self.graph, [i for _, i in runs])

    def carried(self, x: Floats) -> Floats:
        """S per stage and op, the largest over the op's outputs: what two-phase rounding rounds."""
        S = np.zeros((len(self.graph.ops), len(self.graph.ops)))
        for (t, d), column in self.S.items():
            stage, op = self.nodes[t], int(self.graph.arrays.producer[d])
            S[stage, op] = max(S[stage, op], x[column])
        return S

    def point(self, judged: Simulation) -> Floats | None:
        """The point of a schedule, to start the solver from; None if the schedule is outside the program's class."""
        row = stages(judged.schedule)
        if not self.partitioned or len(np.unique(row)) != len(self.nodes):
            return None
        x = np.zeros(len(self.program.cost))
        for t, i in zip(row.tolist(), judged.schedule.ops.tolist(), strict=True):
            if (t, i) not in self.R:
                return None
            x[self.R[t, i]] = 1.0
        alive = judged.instances
        for d, first, last in zip(alive.value.tolist(), row[alive.first], row[alive.last], strict=True):
            for t in range(first + 1, last + 1):
                if (t, d) not in self.S:
                    return None
                x[self.S[t, d]] = 1.0
        self._fill_memory(x)
        return x

    def _fill_memory(self, x: Floats) -> None:
        """FREE by its definition (6), then U by its recurrence (2), (3)."""
        a = self.graph.arrays
        size = a.bytes / self.byte_unit
        for (t, d, k), free in self.FREE.items():
            if a.required[d]:
                x[free] = x[self.R[t, k]] * x[self.S[t, d]]
            else:
                x[free] = float(x[self.R[t, k]] == 1 and not any(x[h] for h in self._hazards(t, d, k)))
        freed: dict[tuple[int, int], float] = defaultdict(float)
        for (t, d, k), free in self.FREE.items():
            freed[t, k] += x[free] * size[d]
        use, stage = 0.0, -1
        for (t, k), column in self.U.items():
            if t != stage:
                stage, use = t, sum(x[column] * size[d] for d, column in self._carried(t))
            inplace = int(a.overwriting[self.kernel[k]])
            use += x[self.R[t, k]] * sum(size[d] for d in self.writes[k] if d != inplace)
            x[column] = use
            use -= freed[t, k]


def _unit(sizes: list[int], room: int) -> float:
    """A unit of memory that keeps coefficients tame: the common divisor where that is enough, else room / 1000."""
    divisor = reduce(math.gcd, sizes, 0)
    return float(divisor) if divisor and room <= 10_000 * divisor else max(room, 1) / 1000.0


def _time_unit(times: list[float]) -> float:
    total = math.fsum(times)
    if all(isinstance(time, int) for time in times):
        divisor = reduce(math.gcd, [int(time) for time in times], 0)
        if divisor and total <= 10_000 * divisor:
            return float(divisor)
    return total / 1000.0 or 1.0
