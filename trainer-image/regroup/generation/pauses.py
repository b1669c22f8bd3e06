"""The sleep of a process between two questions whether something has come, where nothing can wake it. Pure."""

SHORTEST_S = 0.00002
LONGEST_S = 0.001
_PART = 64


def pause_s(waited_s: float, longest_s: float = LONGEST_S) -> float:
    """Return the seconds to sleep before the next question, after a wait of `waited_s` so far.

    The sleep is a 64th of the wait, within SHORTEST_S and `longest_s`. So it makes a wait longer by less than 2 %, and a long wait
    costs one question per `longest_s`. With a fixed pause of 1 ms a step of 20 ms lost up to 5 %.
    """
    return min(max(waited_s / _PART, SHORTEST_S), longest_s)
