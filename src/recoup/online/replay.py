"""A log, run by the simulator: names become tensors, and a mutation an operator that makes new ones (Appendix C.6)."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.errors import LogError
from recoup.online import logs
from recoup.online.simulator import Simulator


def replay(instructions: Sequence[logs.Instruction], run: Simulator) -> None:
    """Run the whole log; at its end what is still live is brought back and kept."""
    names: dict[str, int] = {}

    def tensor(name: str) -> int:
        if name not in names:
            raise LogError(f"the log uses {name!r} before it is made, or after it was released")
        return names[name]

    for item in instructions:
        match item:
            case logs.Call(_, args, results, sizes, aliases, cost):
                given = [tensor(name) for name in args]
                views = [None if place < 0 else given[place] for place in aliases]
                names.update(zip(results, run.call(given, sizes, cost, views), strict=True))
            case logs.Release(name):
                run.release(tensor(name))
                del names[name]
            case logs.Copy(target, source):
                names[target] = tensor(source)
                run.retain(names[target])
            case logs.Constant(name, size):
                names[name] = run.constant(size)
            case logs.Mutate(_, args, changed, cost):
                given = [tensor(name) for name in args]
                old = [given[place] for place in changed]
                made = run.call(given, [run.storage_size(one) for one in old], cost)
                for place, before, after in zip(changed, old, made, strict=True):
                    run.release(before)
                    names[args[place]] = after
            case logs.CopyFrom(target, source):
                run.retain(tensor(source))
                run.release(tensor(target))
                names[target] = tensor(source)
    run.finish()
