"""The metrics of several workers as one page, by prometheus-client's multiprocess mode.

Each worker's counters and histograms lie in files under its number, mapped into memory, so that what a worker counted
outlives it and its successor counts on. Its gauges are written there when somebody is about to read (`flush`); those of
a dead worker are struck out by the parent. The parent also made the files, with room on the disk: a write into a hole
of a mapped file kills its process (SIGBUS) where the disk is full. What the library's mode lacks is added here: gauges
that are functions, series that go away, `_created`, and the families' order.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Metric, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the library reads it when it is imported
# Series that leave with their replica or pool; the files keep them.
_LEAVE = frozenset({"replica", "model"})

GAUGES = ("gauge_livesum", "gauge_livemax", "gauge_livemin")
_KINDS = ("counter", "histogram", *GAUGES)  # a file each, as the library names them
ROOM_BYTES = 512 * 1024  # of each: some 2,500 series. A file that needs more grows, then with holes.

Series = tuple[str, tuple[str, ...]]


class MetricFiles:
    """This worker's way into the directory. Made once per process, before the first metric."""

    def __init__(self, directory: Path, number: int, since_s: float) -> None:
        """`since_s`: when the gateway, not this worker, began to count; as time.time() has it."""
        if os.environ.get(VARIABLE) != str(directory):
            raise RuntimeError(f"{VARIABLE} must name {directory} before prometheus_client is imported")
        values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
        # It says at each removal that it can't remove; `over` does.
        warnings.filterwarnings("ignore", r".*multi-process mode yet", UserWarning)
        self._directory = directory
        self._since_s = since_s
        self._functions: dict[Series, tuple[Gauge, Callable[[], float]]] = {}
        self._gone: dict[Series, Gauge] = {}
        self.gauge_class = self._make_gauge_class()

    def flush(self) -> None:
        for gauge in self._gone.values():
            gauge.set(0)
        self._gone.clear()
        for gauge, function in self._functions.values():
            gauge.set(function())

    def over(self, registry: CollectorRegistry) -> Collector:
        """The families of this registry, with everybody's samples."""
        return _Whole(self, registry)

    def collect(self, registry: CollectorRegistry) -> Iterator[Metric]:
        self.flush()
        collector: Collector = MultiProcessCollector(None, str(self._directory))  # type: ignore[no-untyped-call]
        found = {family.name: family for family in collector.collect()}
        for family in registry.collect():
            whole = found.get(family.name)
            samples = [] if whole is None else whole.samples
            if samples and _LEAVE & samples[0].labels.keys():
                here = {_labels(sample) for sample in family.samples}
                samples = [sample for sample in samples if _labels(sample) in here]
            family.samples = [*samples, *self._created(family.name, family.type, samples)]
            yield family

    def _created(self, name: str, kind: str, samples: list[Sample]) -> Iterator[Sample]:
        """Since when it is counted. A worker's own start would look like a restart of the gateway's."""
        if kind in ("counter", "histogram"):
            for labels in dict.fromkeys(_labels(sample) for sample in samples):
                yield Sample(f"{name}_created", dict(labels), self._since_s, None, None)

    def _make_gauge_class(self) -> type[Gauge]:
        functions, gone = self._functions, self._gone

        class FlushedGauge(Gauge):
            """One whose function is asked at `flush`."""

            @property
            def _series(self) -> Series:
                return self._name, tuple(self._labelvalues)

            def set_function(self, f: Callable[[], float]) -> None:
                functions[self._series] = self, f
                gone.pop(self._series, None)

            def remove_by_labels(self, labels: dict[str, str]) -> None:
                super().remove_by_labels(labels)
                wanted = {self._labelnames.index(name): value for name, value in labels.items()}
                self._forget(lambda values: all(values[at] == value for at, value in wanted.items()))

            def clear(self) -> None:
                super().clear()
                self._forget(lambda values: True)

            def _forget(self, leaves: Callable[[tuple[str, ...]], bool]) -> None:
                for series in [each for each in functions if each[0] == self._name and leaves(each[1])]:
                    gone[series] = functions.pop(series)[0]

        return FlushedGauge


class _Whole(Collector):
    """What `generate_latest` asks for."""

    def __init__(self, files: MetricFiles, registry: CollectorRegistry) -> None:
        self._files = files
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        return self._files.collect(self._registry)


def reserve(directory: Path, number: int) -> None:
    """Make a worker's files, with room on the disk. Raises OSError."""
    for kind in _KINDS:
        with _file(directory, kind, number).open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)


def forget_worker(directory: Path, number: int) -> None:
    """A worker ended: what it held it holds no more. What it counted stays, and so does the files' room."""
    for kind in GAUGES:
        with _file(directory, kind, number).open("r+b") as file:
            file.write(bytes(4))  # how much of the file is in use


def _file(directory: Path, kind: str, number: int) -> Path:
    return directory / f"{kind}_{number}.db"


def _labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
