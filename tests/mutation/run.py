"""The command: every mutant of the tables, its verdict as it comes, and both scores."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import transformers

from mutation.gate import GateBench, undisturbed
from mutation.gate_table import GATE
from mutation.generation_table import GENERATION
from mutation.goldens import GoldenBench
from mutation.mutant import Bench, Mutant, Outcome, Readings, Tag, judge
from mutation.oracle import OracleBench
from mutation.oracle_table import ORACLE

MUTANTS: tuple[Mutant, ...] = (*GATE, *ORACLE, *GENERATION)
SCHEMA = 1
_SAY = partial(print, flush=True)


def benches(folder: Path) -> dict[str, Bench]:
    """One of each kind; they work in ``folder``."""
    return {"gate": GateBench(folder), "oracle": OracleBench(folder), "goldens": GoldenBench()}


def measured(mutant: Mutant, bench: Bench) -> Outcome:
    """The mutant's outcome; one that cannot be measured proves nothing, and counts as a survivor."""
    try:
        return judge(mutant, bench.measure(mutant), bench.control(mutant))
    except Exception as e:
        return Outcome(mutant, "missed", f"cannot be measured: {type(e).__name__}: {e}"[:500])


def main(
    arguments: Sequence[str],
    mutants: Sequence[Mutant] = MUTANTS,
    make: Callable[[Path], dict[str, Bench]] = benches,
    say: Callable[[str], None] = _SAY,
) -> int:
    """Runs the command.

    Args:
        arguments: Of the command line.
        mutants: The table.
        make: Makes the benches, in a folder that is theirs.
        say: Prints a line.

    Returns:
        0; 1 where a mutant survives or something is red with nothing changed; 2 where no mutant is named.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants whose site-name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    asked = parser.parse_args(arguments)
    chosen = [m for m in mutants if not asked.words or any(word in str(m) for word in asked.words)]
    if not chosen:
        say(f"No mutant's name contains {' or '.join(asked.words)}; --list prints all {len(mutants)}.")
        return 2
    if asked.list:
        for mutant in chosen:
            say(_line("", mutant, ", ".join(": ".join(metric) for metric in mutant.red) or mutant.equivalent))
        return 0
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-mutation-") as folder, undisturbed():
        at = make(Path(folder))
        outcomes = []
        for mutant in chosen:
            outcomes.append(measured(mutant, at[mutant.bench]))
            say(_line(outcomes[-1].verdict, mutant, outcomes[-1].detail))
        return _summary(outcomes, dict(_red_controls(chosen, at)), time.monotonic() - started, say)


def _line(verdict: str, mutant: Mutant, detail: str) -> str:
    return f"{verdict:10}  {mutant.tag:11}  {mutant.site:30}  {mutant.name:44}  {detail}"


def _red_controls(mutants: Iterable[Mutant], at: dict[str, Bench]) -> Iterator[tuple[str, Readings | None]]:
    """Each site with nothing changed: what is red there."""
    for mutant in mutants:
        name = f"{mutant.bench}: {mutant.unchanged}"
        try:
            readings = at[mutant.bench].control(mutant)
        except Exception:
            yield name, None
        else:
            yield name, {m: r for m, r in readings.items() if r.red}


def _summary(outcomes: list[Outcome], controls: dict[str, Readings | None], seconds: float, say: Callable[[str], None]) -> int:
    """Prints controls, equivalents, survivors, scores, and the same as JSON."""
    wrong = [name for name, red in controls.items() if red is None or red]
    say(f"\ncontrols   {len(controls) - len(wrong)} of {len(controls)} unchanged sites are green" + _list(wrong))
    equivalent = [o for o in outcomes if o.verdict == "equivalent"]
    say(f"equivalent {len(equivalent)} (in no score)" + _list(f"{o.mutant}: {o.detail}" for o in equivalent))
    survivors = [o for o in outcomes if o.survived]
    say(f"survivors  {len(survivors)}" + _list(f"{o.mutant}: {o.detail}" for o in survivors))
    scores: dict[str, dict[str, int]] = {}
    for tag in get_args(Tag):
        counted = [o for o in outcomes if o.mutant.tag == tag and not o.mutant.equivalent]
        scores[tag] = {"caught": sum(o.verdict == "caught" for o in counted), "mutants": len(counted)}
    say("   ".join(_score(tag, **score) for tag, score in scores.items()))
    failed = bool(survivors or wrong)
    totals = {
        "schema": SCHEMA,
        "passed": not failed,
        **scores,
        "equivalent": [str(o.mutant) for o in equivalent],
        "survivors": [str(o.mutant) for o in survivors],
        "red_controls": wrong,
        "seconds": round(seconds, 1),
    }
    say(json.dumps(totals))
    return int(failed)


def _score(tag: str, caught: int, mutants: int) -> str:
    # Rounded down: 100 % means all of them.
    return f"{tag}: {caught}/{mutants} ({100 * caught // mutants} %)" if mutants else f"{tag}: none chosen"


def _list(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
