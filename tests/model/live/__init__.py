"""The liveness model: does training always go on? One step deeper than tests/model/core.py in who tells whom what, one step
shallower in training itself (one commit a generation is enough to tell states apart).

What is searched (search.py, `forever`): from every state that the bounded faults can lead to, without another fault and
whatever the order of moves, the job commits again. So no state where nothing can happen, and no circle without a commit.
That is stronger than liveness under fair scheduling, since not even an unfair order may go round for ever. Beside it: no
silent roll-back, no split brain, no drained pod that takes the last state with it.

Files: records.py what a state is made of, and the rules' switches; view.py what an agent says, what the operator makes of it,
rule WITNESS; moves_worker.py, moves_operator.py, moves_faults.py what can happen next; renumber.py the simplest form of a
state; model.py ties them together; scenarios.py the traces and their bounds.

**Made to match the code.** The operator plans from what it was told (plan/facts/standing.py, and in plan/generation/ forced.py
`forced_generation`, survivors.py `choose_members`, target.py `target_of`, `_hand_over`, `overtaking`, retry.py `names_of`,
document.py `_never_stepped`), the trainer decides by generation/adoption.py `decide`, a seal is aggregate.py `seal`. Change one,
change the other, and look at the numbers of states.

**Modelled.** replicas and minReplicas that change at any moment; workers that are connected but no members; one process
killed, or all at once; a process that hangs for ever with its agent answering; container restarts; pods lost, made,
released, drained, with pod and successor in one slot; streams that end and are opened again; operators that restart and
forget sessions, documents and what they tried; an unreadable checkpoint, for one worker or all. By scenario: reports that
the operator reads late, so that it plans from what is no longer true; the last generation but one still on its way.

**Time** has no numbers. A deadline or the end of a pause happens where nothing else can; the fault `slow` lets it come too
early. A pause after a failure changes nothing here, since nobody else uses the time. Assumed: a deadline is longer than what it
bounds, and the grace of a drained pod longer than the deadlines.

**Not modelled.** More than one process per worker, steps, snapshots, copies cut half way (all in core.py or tested on the
real code only); a report twice (the operator takes in whole reports, so the second changes nothing); two leaders; agents
that are never reachable again while their pod stays (an unreachable holder: the job waits, and says so). A hanging worker
that alone holds the newest state is restarted in place like a crash, so that state is lost.
"""
