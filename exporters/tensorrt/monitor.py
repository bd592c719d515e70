"""The builder's nested phases as one fraction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Reports closer together than this are not worth a line.
_STEP = 0.005


class Fraction:
    """How much of the outermost phase is done; every phase counts for one step of its parent. Never falls."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name → parent, steps, steps done
        self._most = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of ``steps`` steps begins inside ``parent``."""
        self._phases[name] = (parent, max(steps, 1), 0)

    def step(self, name: str, step: int) -> None:
        """Step number ``step`` of a phase is done."""
        if name in self._phases:
            parent, steps, _ = self._phases[name]
            self._phases[name] = (parent, steps, min(step + 1, steps))

    def finish(self, name: str) -> None:
        """A phase ends."""
        parent, _, _ = self._phases.pop(name, (None, 1, 1))
        if parent is None:
            self._most = 1.0

    @property
    def value(self) -> float:
        """From 0 to 1."""
        roots = [name for name, (parent, _, _) in self._phases.items() if parent is None]
        if roots:
            self._most = max(self._most, self._of(roots[0]))
        return self._most

    def _of(self, name: str) -> float:
        _, steps, done = self._phases[name]
        inside = sum(self._of(child) for child, (parent, _, _) in self._phases.items() if parent == name)
        return float(min((done + min(inside, 1.0)) / steps, 1.0))


def progress_monitor(trt: Any, report: Callable[[str, float], None]) -> Any:
    """An ``IProgressMonitor`` that reports the name of the newest phase and the fraction done."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes the builder's phases on."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.fraction, self.said, self.phase = Fraction(), -1.0, ""

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.fraction.start(phase, parent, steps)
            self.phase = phase
            self._say()

        def step_complete(self, phase: str, step: int) -> bool:
            self.fraction.step(phase, step)
            self._say()
            return True  # False would cancel; the parent ends this process instead, which is faster

        def phase_finish(self, phase: str) -> None:
            self.fraction.finish(phase)
            self._say()

        def _say(self) -> None:
            value = self.fraction.value
            if value >= self.said + _STEP or (value == 1.0 and self.said < 1.0):
                self.said = value
                report(self.phase, round(value, 4))

    return Monitor()
