"""An explicit-state model of the membership protocol (docs/design/protocol.md), searched for the traces named there.

Without a rule the trace beside it in protocol.md must be found; with all rules on it must not. The tests run in about
a minute and count states, not seconds; `python -m tests.model [RULE ...]` searches the wider scenarios and prints their
numbers of states (minutes; `make test-all` calls it; exit code 1 if an outcome is not the expected one).

Four models. This folder's own is about safety: no step lost or done twice, whatever happens. live/ is about liveness: training
always goes on (rules HEARD, WORDS, BEST, RETRY and those beside them). groups/ is about safety where one copy of the model is split
over several ranks (REDUCED, KEEP and those beside them), and server.py about a parameter server (adr/0031); neither is in the
code yet. Their docstrings say what they model.

Files: records.py what a state is made of, and the rules' switches; view.py questions to a state, the witness walk,
what must never be; moves_worker.py, moves_operator.py, moves_faults.py what can happen next; core.py ties them
together; side.py three small models; search.py the search; scenarios.py the traces and their bounds.

**Modelled.** Operators that crash, restart, or are two; agents whose messages are late, reordered, repeated or lost
(any announced generation may reach any connected agent at any time); processes killed, stopped, restarted in place;
pods lost and replaced; links cut between workers, or from one to the operator; forming, witness, copying, steps,
snapshots, planned changes, completion. Suspicion has no clock: with `announces="any"` the operator may announce any
set at any time, so no timeout value is assumed. "Parameters" are the list of generations in which each step was
committed: equal lists, equal parameters.

**Not modelled**, so tested on the real code only: time and thresholds, more than one process per worker, copies
in a peer's memory, links that fail in one direction, pruning of `older`, the content of messages.

**What the model cannot show.**
- H13 FENCE has no switch: an agent of the model never hears a generation that is not newer.
- H7 INC: a process that enters a generation twice waits for ever in all scenarios but its own, where `stale_store`
  lets it take the old keys for a formed group. That move exists only with INC off.
- H5 SEAL: "all rules on" is judged from where the trace is stuck onwards, which is exhausted; from the first state
  on it is exhausted only by `python -m tests.model SEAL` at four generations, not at five.
- H8 BACKUP with all rules on is searched to 100 000 states, not exhausted. Neither are four of the wide scenarios (H1
  twice, H8, H2 without a cause) at 1.4 million.
- Random walks find STATE, MAD and the liveness rules by luck only; their rules-off check covers the six others.

**To add a rule**: a constant with its sentence in records.py and ALL_RULES; `if RULE in view.rules` where a part
behaves differently; what must never be, if it is new, in view.py; a `Trace` in scenarios.py with the smallest
scenario that shows it. Run it, read the trace aloud, note both numbers of states. If the numbers of *other* traces
changed, the new code is not behind its switch.
"""
