"""Programs with known answers: the linear network of the paper's Appendix A, and the adversary of Appendix B."""

from __future__ import annotations

from recoup.online.simulator import Simulator


def linear_network(run: Simulator, length: int) -> None:
    """N operators forward and N backward, of unit cost and size; a tensor goes when nothing reads it any more."""
    [last] = run.call([], [1], 1)
    forward = [last]
    for _ in range(length - 1):
        [last] = run.call([last], [1], 1)
        forward.append(last)
    run.release(forward.pop())
    [gradient] = run.call([forward[-1]], [1], 1)
    run.release(forward.pop())
    while forward:
        [following] = run.call([forward[-1], gradient], [1], 1)
        run.release(forward.pop())
        run.release(gradient)
        gradient = following
    [_] = run.call([gradient], [1], 1)
    run.release(gradient)


def adversary(run: Simulator, length: int, paths: int) -> None:
    """Reveals, ``length`` times, an operator at the end of a path of which nothing is in memory (Theorem 3.2).

    The common parent of all ``paths`` is always in memory; some path is not, as there are as many as there is room.
    """
    parent = run.constant(1)
    chains: list[list[int]] = []
    for _ in range(length):
        if len(chains) < paths:
            chains.append(run.call([parent], [1], 1))
            continue
        gone = [chain for chain in chains if not any(run.defined[tensor] for tensor in chain)]
        chain = min(gone, key=len)
        chain += run.call([chain[-1]], [1], 1)
