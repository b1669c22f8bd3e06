"""A trainer process without torch: speaks the local protocol by hand and notes what it sees. Run by a real agent.

It attaches, enters what it is assigned, adopts, and commits a step every 20 ms. Arguments change that:
`finish=N` says finished at step N, and returns once it is told to leave its loop;
`slow=R` does not return then in local rank R; `exit=CODE` ends right after attaching; `stuck` ignores SIGTERM and stop;
`noise=N` writes N lines to stderr first;
`take` asks for the store's socket; `tcpstore` serves torch's store on it; `again` enters the same generation twice.
"""

import json
import os
import select
import signal
import socket
import sys
import time

from regroup.protocol import local
from regroup.protocol.state import StatePair

ARGS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
NOTES = open(f"{os.environ['NOTES']}/{os.getpid()}", "a", buffering=1)  # noqa: SIM115
LOCAL_RANK, INCARNATION = int(os.environ["LOCAL_RANK"]), int(os.environ["REGROUP_INCARNATION"])


def note(what: str, **fields: object) -> None:
    common = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "rank": LOCAL_RANK, "incarnation": INCARNATION}
    NOTES.write(json.dumps({**common, **fields}) + "\n")


class Agent:
    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["REGROUP_SOCKET"])
        self.buffer = b""

    def send(self, message: object) -> None:
        self.sock.sendall(local.encode(message))

    def poll(self, timeout_s: float) -> object | None:
        """Return the next message, or None after `timeout_s`. The agent gone is the end."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            if not select.select([self.sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = self.sock.recv(1 << 16)
            if not data:
                note("agentGone")
                os._exit(3)
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        message: object = local.TO_TRAINER.decode_line(line)
        return message

    def answer(self) -> local.Answer:
        while True:
            message = self.poll(60.0)
            if isinstance(message, local.Answer):
                return message


def take_store(number: int) -> tuple[str, int | None]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ["REGROUP_SOCKET"])
        sock.sendall(local.encode(local.TakeStore(number)))
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        return data.decode(), fds[0] if fds else None


def enter(agent: Agent, assignment: local.Assignment) -> bool:
    agent.send(local.Entering(assignment.number))
    answer = agent.answer()
    note("entering", generation=assignment.number, ok=answer.ok, adopted=answer.adopted, message=answer.message)
    return answer.ok


def form(assignment: local.Assignment) -> None:
    if not ({"take", "tcpstore"} & ARGS.keys() and assignment.hosts_store):
        return
    said, fd = take_store(assignment.number)
    port = socket.socket(fileno=os.dup(fd)).getsockname()[1] if fd is not None else 0
    note("store", said=said, port=port)
    if "tcpstore" in ARGS:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, number = assignment.store_host, assignment.store_port
        store = TCPStore(host, number, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        store.set("key", "value")
        client = TCPStore(host, number, is_master=False)
        note("served", value=client.get("key").decode())


def main() -> None:
    if "stuck" in ARGS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    environ = {name: os.environ.get(name) for name in names}
    note("started", env=environ, argv=sys.argv[1:], main=sys.modules["__main__"].__file__)
    agent = Agent()
    agent.send(local.Attach(os.getpid(), LOCAL_RANK, INCARNATION))
    if "noise" in ARGS:
        for number in range(int(ARGS["noise"])):
            sys.stderr.write(f"noise {number:099d}\n")
        note("noise")
    if "exit" in ARGS:
        sys.stderr.write("first line\nthe last words\n")
        sys.exit(int(ARGS["exit"]))
    state: StatePair | None = None
    inside = step = finished = committed_in = 0
    while True:
        message = agent.poll(0.02 if inside and not finished else 60.0)
        if isinstance(message, local.StopLocally):
            note("stop", outcome=message.outcome)
            if "stuck" not in ARGS:
                return
        elif isinstance(message, local.FinishLocally):
            note("finish", step=message.step, place=message.rank, world=message.world_size)
            if ARGS.get("slow") != str(LOCAL_RANK):
                return
        elif isinstance(message, local.Assignment):
            note("assignment", generation=message.number, member=message.member, digest=message.document_digest,
                 document=message.document.digest() if message.document else None, hosts=message.hosts_store)  # fmt: skip
            if inside:
                agent.send(local.Left(message.number - 1, state, inside, step))
                inside = 0
            if message.member and enter(agent, message):
                finished = 0
                form(message)
                agent.send(local.FormedLocally(message.number, 1.5))
                state = state or StatePair(message.number, 0)
                step = state.step
                agent.send(local.AdoptedLocally(message.number, step, "self", state, 0.5))
                answer = agent.answer()
                note("adopted", generation=message.number, ok=answer.ok)
                inside = message.number
                if "again" in ARGS:
                    enter(agent, message)
        elif message is None and inside and not finished:
            step += 1
            state = StatePair(inside, step)
            first_ms = 2.5 if inside != committed_in else None
            committed_in = inside
            agent.send(
                local.Committed(inside, step, step, 0.5, step * 8, f"d{step}", 100, 400.0, first_step_ms=first_ms)
            )
            if step == int(ARGS.get("finish", 0)):
                finished = inside
                agent.send(local.FinishedLocally(inside, step))


if __name__ == "__main__":
    main()
