"""MemberChecks: the promises of membership, judged by what each node saw of the others.

| promise | what is judged |
|---|---|
| M1 | a run of a node joins once; it leaves or is lost once, and again only after it returned |
| M2 | no node is lost without silence: not while it beats, nor because its observer stood still |
| M3 | when the weather is fair again, every node sees exactly those that are up |

Whether a node was silent is known to those who judge: the simulator, or the log of a real network.
"""

from collections.abc import Callable, Set


class MemberChecks:
    """`report` is called with the promise that broke, and how."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._seen: dict[tuple[str, str], bool] = {}  # by observer and subject: whether it is present

    def joined(self, observer: str, subject: str, *, returned: bool) -> None:
        before = self._seen.get((observer, subject))
        if before if returned else before is not None:
            self._report("M1", f"{observer} sees {subject} join again")
        if returned and before is None:
            self._report("M1", f"{observer} sees {subject} return, which never came")
        self._seen[observer, subject] = True

    def gone(self, observer: str, subject: str, *, unfounded: str = "") -> None:
        """`unfounded`: the reason that was given for the loss of a node that was well."""
        if not self._seen.get((observer, subject)):
            self._report("M1", f"{observer} sees {subject} go, which was not there")
        self._seen[observer, subject] = False
        if unfounded:
            self._report("M2", f"{observer} gives up {subject}, which is well: {unfounded}")

    def check_view(self, observer: str, seen: Set[str], there: Set[str]) -> None:
        """`there`: everybody who is up, the observer too."""
        wrong = sorted(seen ^ (there - {observer}))
        if wrong:
            self._report("M3", f"{observer} is wrong about {', '.join(wrong)}")
