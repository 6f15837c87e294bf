"""What was measured and planned before, on disk, so that the second run starts at once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recoup import __version__
from recoup.errors import RecoupError
from recoup.files import write_text
from recoup.torch.costs import Cost
from recoup.torch.estimate import Rates
from recoup.torch.internals.tensors import float32_precisions

Where = bool | str | Path


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/recoup``, or ``~/.cache/recoup``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recoup"


def device_name(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def library_versions() -> str:
    """What a measurement depends on besides the device."""
    parts = [f"recoup {__version__}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        parts += [f"cuda {torch.version.cuda}", f"cudnn {torch.backends.cudnn.version()}"]
    settings = (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        *float32_precisions(),
    )
    return ", ".join([*parts, f"settings {settings}"])


def conditions(device: torch.device) -> str:
    """All that a measurement depends on."""
    return f"{device_name(device)}; {library_versions()}"


@dataclass
class Store:
    """Costs by signature, for one device and one set of library versions; plans by what they were made for.

    A file that cannot be read is treated as empty and one that cannot be written is left: the store is a convenience.
    """

    device: torch.device
    folder: Path | None
    measured_with: str = ""
    """The hardware, the library versions and the settings that its measurements are of."""
    _costs: dict[str, list[Any]] = field(default_factory=dict)
    _rates: Rates | None = None
    _changed: bool = False

    @staticmethod
    def open(device: torch.device, where: Where = True) -> Store:
        """The store in ``where``: a folder, True for the default one, False for none."""
        folder = default_folder() if where is True else None if where is False else Path(where)
        store = Store(device, folder)
        store.reload()
        return store

    def reload(self) -> None:
        """Begin anew, with what is on disk for the library versions and settings of now."""
        self.measured_with = conditions(self.device)
        data = self._read("costs")
        self._costs = _costs(data)
        rates = data.get("rates")
        self._rates = Rates(rates[0], rates[1]) if isinstance(rates, list) and len(rates) == 2 else None
        self._changed = False

    def cost(self, key: str) -> Cost | None:
        """What the op with this signature cost when it was measured."""
        found = self._costs.get(_digest(key))
        return None if found is None else Cost(found[0], found[1], None if found[2] is None else tuple(found[2]))

    def remember(self, key: str, cost: Cost) -> None:
        """Keep a measurement until :meth:`save`."""
        self._costs[_digest(key)] = [cost.seconds, cost.workspace, cost.outputs]
        self._changed = True

    def rates(self) -> Rates:
        """The device's peak rates, measured when first asked for."""
        if self._rates is None:
            from recoup.torch.estimate import measure_rates

            self._rates = measure_rates(self.device)
            self._changed = True
        return self._rates

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Whatever is remembered meanwhile is written at the end, also if the user ends it early."""
        try:
            yield
        finally:
            self.save()

    def save(self) -> None:
        """Write what is new, merged with what another process may have written meanwhile."""
        if self._changed:
            costs = {**_costs(self._read("costs")), **self._costs}
            data: dict[str, Any] = {"costs": costs}
            if self._rates is not None:
                data["rates"] = [self._rates.bytes_per_second, self._rates.flops_per_second]
            self._write("costs", data)
            self._changed = False

    def recall(self, key: str) -> list[Any] | None:
        """What was kept for this key: the steps of a schedule, or what was learned about one."""
        kept = self._read(f"plan-{_digest(key)}").get("kept")
        return kept if isinstance(kept, list) else None

    def keep(self, key: str, what: list[Any]) -> None:
        """Keep something for the next process."""
        self._write(f"plan-{_digest(key)}", {"kept": what})

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{name}-{_digest(self.measured_with)}.json"

    def _read(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        try:
            data = json.loads(path.read_bytes()) if path is not None else {}
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _write(self, name: str, data: dict[str, Any]) -> None:
        path = self._path(name)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(data))
        except (OSError, RecoupError):
            return


def _costs(data: dict[str, Any]) -> dict[str, list[Any]]:
    """What a file of costs holds, less what is no cost."""
    costs = data.get("costs")
    entries = costs.items() if isinstance(costs, dict) else ()
    return {key: cost for key, cost in entries if isinstance(cost, list) and len(cost) == 3}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
