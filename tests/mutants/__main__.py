"""Mutants (`make mutants`): how many wrong changes to a module do its own tests notice?

    python -m tests.mutants [--seed N] [--per-module K] [--module PART] [--all] [--list]

Of each subject (`subjects.py`) so many mutants are drawn, and the guards of the subject run on each, in
a copy of the source. A test that fails or takes far too long kills the mutant. What survives is printed,
and means one of two: a test is missing, or the change makes no difference; then `survivors.txt` says why.
The status is 1 when fewer than 90 % of the mutants that nobody has explained were killed, of all or of one
module (with ten of them or more); 2 when the guards of a module cannot judge it.
"""

import argparse
import random
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutations import Mutant
from tests.mutants.subjects import SUBJECTS, Subject
from tests.mutants.survivors import SURVIVORS, Explained, explained_by, read, stale
from tests.mutants.trial import CannotJudge, Fate, Trial, mutants_of

PER_MODULE = 20
AT_ONCE = 2
KILLED_SHARE_MIN = 0.9
JUDGED_MIN = 10  # with fewer a module is judged only as a part of the whole


def main() -> int:
    options = _parse()
    subjects = [
        one for one in SUBJECTS if not options.module or any(part in one.path for part in options.module)
    ]
    if not subjects:
        print(f"no subject has {' or '.join(options.module)} in its path", file=sys.stderr)
        return 2
    explained = read(SURVIVORS)
    if options.list:
        for subject in subjects:
            print(f"{subject.path}: {len(mutants_of(subject))} mutants")
        return 0
    print(f"seed {options.seed}, {'all' if options.all else options.per_module} mutants a module")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was started is ended
    try:
        with tempfile.TemporaryDirectory(prefix="umbel-mutants-") as home:
            trials = [Trial(Path(home) / str(number)) for number in range(AT_ONCE)]
            verdicts = [_judge(subject, trials, explained, options) for subject in subjects]
    except CannotJudge as error:
        print(error, file=sys.stderr)
        return 2
    killed, judged = (sum(counts) for counts in zip(*((k, j) for k, j, _ in verdicts), strict=True))
    print(f"all: {killed} of {judged} killed ({_share(killed, judged):.0%})")
    good = all(good for _, _, good in verdicts) and _share(killed, judged) >= KILLED_SHARE_MIN
    return 0 if good else 1


def _judge(
    subject: Subject, trials: list[Trial], explained: Explained, options: argparse.Namespace
) -> tuple[int, int, bool]:
    """How many mutants were killed, of how many that nobody has explained; whether that is enough."""
    mutants = mutants_of(subject)
    known = explained.get(subject.path, {})
    gone = stale(known, mutants)
    for place in gone:
        print(f"{subject.path}: survivors.txt explains what is there no more: {place}")
    open_ones = [one for one in mutants if explained_by(known, one) is None]
    count = len(open_ones) if options.all else min(options.per_module, len(open_ones))
    # By name, so that a module's sample does not depend on which other modules are asked for.
    drawn = random.Random(f"{options.seed} {subject.path}").sample(open_ones, count)
    trials[0].prepare(subject)
    for trial in trials:
        trial.take_over(trials[0])
    fates = _fates(subject, trials, drawn)
    killed = sum(fate is not Fate.SURVIVED for fate in fates)
    late = sum(fate is Fate.TIMED_OUT for fate in fates)
    print(
        f"{subject.path}: {killed} of {count} killed ({_share(killed, count):.0%}), {late} of them by the"
        f" time limit of {trials[0].limit_s:.0f} s;"
        f" {len(mutants) - len(open_ones)} of {len(mutants)} explained",
        flush=True,
    )
    for mutant, fate in sorted(zip(drawn, fates, strict=True), key=lambda pair: pair[0].line):
        if fate is Fate.SURVIVED or options.verbose:
            print(f"  {fate.value} {subject.path}:{mutant.line} {mutant.operator}")
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)
    enough = count < JUDGED_MIN or _share(killed, count) >= KILLED_SHARE_MIN
    return killed, count, enough and not gone


def _fates(subject: Subject, trials: list[Trial], mutants: list[Mutant]) -> list[Fate]:
    idle: SimpleQueue[Trial] = SimpleQueue()
    for trial in trials:
        idle.put(trial)
    # Scripts go in as many parts as there are trials, everything else one by one.
    parts = [mutants[place :: len(trials)] for place in range(len(trials))]
    is_script = subject.path.endswith(".lua")

    def fates_of(part: list[Mutant]) -> list[Fate]:
        trial = idle.get()
        try:
            return trial.run_scripts(subject, part) if is_script else [trial.run(subject, *part)]
        finally:
            idle.put(trial)

    chosen = [part for part in parts if part] if is_script else [[one] for one in mutants]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(fates_of, chosen))
    fate_by_text = {
        one.text: fate
        for part, fates in zip(chosen, found, strict=True)
        for one, fate in zip(part, fates, strict=True)
    }
    return [fate_by_text[one.text] for one in mutants]


def _share(killed: int, judged: int) -> float:
    return killed / judged if judged else 1.0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--per-module", type=int, default=PER_MODULE)
    parser.add_argument("--all", action="store_true", help="every mutant: minutes a module")
    parser.add_argument(
        "--module", action="append", help="subjects whose path has this in it; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="only count the mutants of each subject")
    parser.add_argument("--verbose", action="store_true", help="show the killed ones as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
