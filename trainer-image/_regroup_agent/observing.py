"""Decides for how long a member on another node has been silent, and when it is tried next (adr/0057).

An attempt is a TCP connect to a port of the other pod on which nobody listens. A living kernel refuses it at once, whatever the
processes there do; a machine without power or network says nothing. Pure, with the clock passed in; `prober` does the I/O.

A pause of this agent must never look like silence of the other. So silence is counted in attempts that failed in a row,
EVERY_S apart. An observer that gets no CPU makes fewer attempts, and the silence that it counts does not grow.
"""

from __future__ import annotations

from regroup.protocol.wire import SILENT_S, SUSPECT_S, Observed

EVERY_S = 0.25
"""Time between two attempts."""
WITHIN_S = EVERY_S
"""Time after which an attempt without an answer has failed. The next attempt follows at once."""
SELDOM_S = 1.0
"""Time between two attempts to reach a member that has never answered, or has been silent for long."""
MANY = round(SILENT_S / EVERY_S)
"""Number of failed attempts in a row that count as SILENT_S of silence."""


class Watch:
    """One observed member. Attempts follow one another: `begin`, then `answered`, `failed` or `skipped`.

    Each of the three returns the time at which the next attempt begins. Times are seconds of a monotonic clock.
    """

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.has_answered = False
        """The member has answered at least once. Before that its silence means nothing: a firewall may drop the attempts."""
        self._num_failed = 0
        self._first_s = self._begun_s = 0.0
        """Start of the first attempt in the present row of failures, and start of the newest attempt."""

    def begin(self, now_s: float) -> None:
        """Note the start of an attempt."""
        self._begun_s = now_s

    def answered(self) -> float:
        """Note that the other kernel has answered the attempt, by refusing or accepting it."""
        self.has_answered, self._num_failed = True, 0
        return self._begun_s + EVERY_S

    def failed(self) -> float:
        """Note that nothing has answered the attempt within WITHIN_S."""
        if self._num_failed == 0:
            self._first_s = self._begun_s
        self._num_failed += 1
        matters = self.has_answered and self._num_failed < 2 * MANY
        return self._begun_s + (EVERY_S if matters else SELDOM_S)

    def skipped(self) -> float:
        """Note that this machine could not make the attempt, for example for lack of a descriptor. It proves nothing."""
        return self._begun_s + EVERY_S

    def silent_s(self, now_s: float) -> float:
        """Return for how long the member has been silent at least. It is 0.0 for one that answers, and for one that never has."""
        if not self.has_answered or self._num_failed == 0:
            return 0.0
        lasted_s = max(0.0, now_s - self._first_s)
        return lasted_s if self._num_failed >= MANY else min(lasted_s, self._num_failed * EVERY_S)

    @property
    def level(self) -> float:
        """SUSPECT_S or SILENT_S once the silence is so long, else 0.0. The agent reports each change to the operator."""
        if not self.has_answered:
            return 0.0
        tried_s = self._num_failed * EVERY_S
        return SILENT_S if tried_s >= SILENT_S else SUSPECT_S if tried_s >= SUSPECT_S else 0.0
