"""Whether a member on another node still answers: what is tried when, and since when nothing has come back (adr/0057).

An attempt is a TCP connect to a port of the other pod on which nobody listens. A living kernel refuses it at once, whatever the
processes there do; a machine without power or network says nothing. Pure, with the clock passed in; `prober` does the I/O.

A pause of one second must never look like SILENT_S of silence. So silence is counted in attempts that failed in a row, each of
them a fresh one and EVERY_S after the last: an observer that gets no CPU makes fewer attempts, and its silence does not grow.
"""

from __future__ import annotations

from regroup.protocol.wire import SILENT_S, SUSPECT_S, Observed

EVERY_S = 0.25
"""Between two attempts."""
WITHIN_S = EVERY_S
"""An attempt that nothing has answered by then has failed, and the next follows at once."""
SELDOM_S = 1.0
"""Between two attempts to reach what has never answered, or has been silent for long."""
MANY = round(SILENT_S / EVERY_S)
"""So many attempts in a row that failed are SILENT_S of silence."""


class Watch:
    """One member that is observed. One attempt at a time: `begin`, then `answered` or `failed`."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.has_answered = False
        """What has never answered says nothing by its silence: a firewall may drop what is tried."""
        self._num_failed = 0
        self._first_s = self._begun_s = 0.0
        """When the first of the attempts that failed, and when the newest attempt, was begun."""

    def begin(self, now_s: float) -> None:
        """An attempt begins."""
        self._begun_s = now_s

    def answered(self) -> float:
        """The attempt was answered, by a refusal too. Return when the next one begins."""
        self.has_answered, self._num_failed = True, 0
        return self._begun_s + EVERY_S

    def failed(self) -> float:
        """Nothing has answered the attempt within WITHIN_S. Return when the next one begins."""
        if self._num_failed == 0:
            self._first_s = self._begun_s
        self._num_failed += 1
        matters = self.has_answered and self._num_failed < 2 * MANY
        return self._begun_s + (EVERY_S if matters else SELDOM_S)

    def skipped(self) -> float:
        """The attempt could not be made for want of something here. It proves nothing; return when the next one begins."""
        return self._begun_s + EVERY_S

    def silent_s(self, now_s: float) -> float:
        """Return for how long nothing has been heard, at least; 0.0 for one that answers, or never has."""
        if not self.has_answered or self._num_failed == 0:
            return 0.0
        lasted_s = max(0.0, now_s - self._first_s)
        return lasted_s if self._num_failed >= MANY else min(lasted_s, self._num_failed * EVERY_S)

    @property
    def level(self) -> float:
        """SUSPECT_S or SILENT_S once nothing has been heard for so long, else 0.0: a report follows each change."""
        if not self.has_answered:
            return 0.0
        tried_s = self._num_failed * EVERY_S
        return SILENT_S if tried_s >= SILENT_S else SUSPECT_S if tried_s >= SUSPECT_S else 0.0
