"""What each distinct op of a step costs: known from before, measured now, or estimated."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from recoup.torch import algorithms, measuring
from recoup.torch.algorithms import Listener
from recoup.torch.costs import Cost, signature
from recoup.torch.estimate import estimate
from recoup.torch.internals.tensors import real_tensors
from recoup.torch.measuring import measured_as
from recoup.torch.memory import refuse_profilers
from recoup.torch.store import Store, library_versions


def profile(nodes: Iterable[fx.Node], store: Store, listen: Listener, channels_last: bool = False) -> dict[str, Cost]:
    """The cost of every signature among the nodes, from the store or measured now; estimated where it cannot run.

    ``channels_last`` measures convolutions in that layout, which Inductor chooses for most networks. Those that cuDNN
    has algorithms for are for :mod:`recoup.torch.algorithms` to measure.
    """
    device = store.device
    versions = library_versions()
    nodes = list(nodes)
    distinct = {signature(node): node for node in nodes}
    chosen = algorithms.costs(nodes, store, listen, channels_last)
    known = {key: found for key in distinct if (found := store.cost(measured_as(key, channels_last))) is not None}
    costs = known | chosen
    missing = [(key, node) for key, node in distinct.items() if key not in costs]
    if missing and device.type == "cpu":
        refuse_profilers()
    with real_tensors(device), store.saving():
        for count, (key, node) in enumerate(missing):
            listen(count, len(missing))
            costs[key] = measuring.measure(node, device, channels_last) or estimate(node, store.rates())
            if library_versions() != versions:
                break
            store.remember(measured_as(key, channels_last), costs[key])
    if library_versions() != versions:  # on some CPUs PyTorch gives up oneDNN for good at its first bfloat16 product
        store.reload()
        return profile(nodes, store, listen, channels_last)
    if missing:
        listen(len(missing), len(missing))
    return costs
