"""The model of model groups: is a step that is split over several ranks committed by all of them, or by none, and never lost?

A *model group* is the m ranks that together hold one copy of the model; each holds the shard of its *inner index*. Here m = 2,
and two groups train at the start (A: r0 and r1, B: r2 and r3), so inner index 0 is r0 and r2. Elasticity is in whole model
groups, and data parallel sums run among equal inner indexes. Nothing of this is in the code yet: the rules are in
docs/design/protocol.md ("Model groups"), the reasons in adr/0027.

A commit has two phases. Reduce: a rank's part is complete when its model group and all ranks of its inner index have
contributed; that is not everybody. Then rows: whoever has those of all members applies. So a fault in between leaves some
ranks with the step and some without, and no inner index need have a whole set of either state. What a rank holds then (the
state, gradients that it has reduced and not applied, the rows of its last step) is what adoption has to make one state of.

Files: records.py what a state is made of, and the rules' switches; view.py what a generation decides from its arrivals, and
what must never be; moves.py what can happen next; model.py ties them together; scenarios.py the traces and their bounds.

**Modelled.** Commits in two phases, at m = 2; generations of whole model groups, announced at any time, put together of any
ranks with complementary inner indexes; ranks that hear of them late, in whatever order, and go on from what is in their
buffers; adoption by inner index; processes that die and come back with nothing; spares; ranks that are cut off and come back;
agents' copies in memory that outlive a process, or not (a lost pod); guests. "Parameters" are the list of generations in which
each step was reduced.

**What must never be** (view.py): ranks of one generation train on different states; a step is applied with a part of the
batch's rows; a generation goes on from less than what is acknowledged and can be had from the living, or than what somebody
has applied and can be had from those that are connected; a copy or a checkpoint is read while each inner index of the
generation that trained last has a living member. That is the promise for a generation of several groups: one dead process
costs no step. A generation of one group keeps it only for the processes that live.

**Not modelled here**, since core.py has it and m changes nothing in it: two operators and what is persisted (PERSIST), who
says what again (RESAY), links between workers (CLIQUE), agreed cuts (CUTALL: here everybody may leave at any moment, which is
more), finished ranks. The model's operator knows at once that a process has ended; to know it later only delays a decision.
Not modelled at all: p > 1 processes in a worker, m > 2, pipelines, what an exchange of tensors between ranks of one group does
to their buffers.

**Liveness** is asked as in core.py: from every state with an announcement left, all members of a newest generation can reach
the last step without another fault. live/ asks for more, and has no model groups; adr/0027 says what it will need.

**How far.** Tests exhaust any sets of two generations with one crash, and three generations where the sets are given.
`python -m tests.model GROUPS` exhausts any sets of three generations without a fault; with one crash it ends at its bound. The
random walks go to five generations and five faults, with spares and snapshots.

**To add a rule**: as in ../__init__.py.
"""
