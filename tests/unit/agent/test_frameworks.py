"""The environment of each framework: a function of a process's place in its generation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from _regroup_agent import events as ev
from _regroup_agent.launch.environment import preload_modules, trainer_env
from _regroup_agent.launch.frameworks import Place, environment
from regroup.protocol import codec, env, frameworks, local, wire
from regroup.protocol.document import Member
from regroup.protocol.state import Group
from regroup_operator.api import frameworks as api
from tests.unit.agent.drive import Drive, document, generation

LIGHTNING = {"PL_TRAINER_NUM_NODES", "PL_TRAINER_DEVICES"}
"""Variables that all frameworks on torch have, and that the user may set."""
COMMON = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def place(worker: int = 0, workers: int = 1, local_rank: int = 0, processes: int = 1, **changes: Any) -> Place:
    """Return the place of a process of a worker, among workers with the addresses 10.0.0.1, 10.0.0.2 and so on."""
    command = generation(
        3, processes, rank_offset=worker * processes, world_size=workers * processes, group_rank=worker
    )
    members = tuple(
        Member(slot, f"w-{slot}", f"p-{slot}", 1, f"10.0.0.{slot + 1}", processes,
               tuple(7000 + 10 * slot + rank for rank in range(processes)))
        for slot in range(workers)
    )  # fmt: skip
    return Place(command, local_rank, processes, members, **changes)


@pytest.mark.parametrize("framework", frameworks.ALL)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("processes", [1, 2])
def test_all_processes_of_a_generation_agree_on_its_size_and_each_has_a_rank_of_its_own(
    framework: str, workers: int, processes: int
) -> None:
    size = {
        frameworks.PYTORCH: ("RANK", "WORLD_SIZE"), frameworks.DEEPSPEED: ("RANK", "WORLD_SIZE"),
        frameworks.HOROVOD: ("HOROVOD_RANK", "HOROVOD_SIZE"), frameworks.JAX: ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        frameworks.XGBOOST: ("DMLC_TASK_ID", "DMLC_NUM_WORKER"), frameworks.NONE: ("REGROUP_RANK", "REGROUP_WORLD_SIZE"),
    }  # fmt: skip
    found = [
        environment(framework, place(worker, workers, local_rank, processes))
        for worker in range(workers)
        for local_rank in range(processes)
    ]
    if framework == frameworks.TENSORFLOW:
        configs = [json.loads(one["TF_CONFIG"]) for one in found]
        seen = [(config["task"]["index"], len(config["cluster"]["worker"])) for config in configs]
        assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
        assert len(set(configs[0]["cluster"]["worker"])) == workers * processes
    else:
        rank, count = size[framework]
        seen = [(int(one[rank]), int(one[count])) for one in found]
    assert seen == [(rank, workers * processes) for rank in range(workers * processes)]


@pytest.mark.parametrize(
    ("framework", "want"),
    [
        pytest.param(frameworks.PYTORCH, {}, id="PyTorch has torchrun's"),
        pytest.param(
            frameworks.DEEPSPEED, {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "3"}, id="DeepSpeed its launcher's"
        ),
        pytest.param(
            frameworks.HOROVOD,
            {
                "HOROVOD_RANK": "3", "HOROVOD_SIZE": "6", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
                "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "3", "REGROUP_HOROVOD": "1",
            },
            id="Horovod six ranks",
        ),
        pytest.param(
            frameworks.JAX,
            {
                "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4000", "JAX_NUM_PROCESSES": "6", "JAX_PROCESS_ID": "3",
                "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_MCA_orte_hnp_uri": "0.0;tcp://127.0.0.1:1",
            },
            id="JAX a coordinator and Open MPI's",
        ),
        pytest.param(
            frameworks.XGBOOST,
            {"DMLC_NUM_WORKER": "6", "DMLC_TASK_ID": "3", "DMLC_TRACKER_URI": "10.0.0.1", "DMLC_TRACKER_PORT": "4000"},
            id="XGBoost a tracker at rank 0",
        ),
    ],
)  # fmt: skip
def test_second_process_of_the_second_of_three_workers(framework: str, want: dict[str, str]) -> None:
    got = environment(framework, place(1, 3, 1, 2))
    assert {name: got[name] for name in COMMON} == {
        "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
    }  # fmt: skip
    assert {name: value for name, value in got.items() if name not in COMMON | LIGHTNING} == want
    assert set(want) == set(frameworks.RESERVED[framework])


def test_tensorflow_has_every_process_with_its_own_port() -> None:
    config = json.loads(environment(frameworks.TENSORFLOW, place(1, 2, 1, 2))["TF_CONFIG"])
    workers = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7010", "10.0.0.2:7011"]
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 3}}


def test_address_of_version_6_stands_in_brackets() -> None:
    given = Place(generation(1, store_host="fd00::1"), 0, 1, (Member(0, "w", "p", 1, "fd00::1", 1, (7000,)),))
    assert environment(frameworks.JAX, given)["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:4000"
    config = json.loads(environment(frameworks.TENSORFLOW, given)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["[fd00::1]:7000"]
    assert environment(frameworks.XGBOOST, given)["DMLC_TRACKER_URI"] == "fd00::1"


def test_none_has_no_name_that_a_library_reads() -> None:
    environ = {"RANK": "7", env.FRAMEWORK: frameworks.NONE}
    got = trainer_env(
        environ, socket_path="/a", local_rank=1, processes=2, incarnation=1, restarts=0, place=place(1, 3, 1, 2)
    )
    assert not COMMON & set(got)
    assert (got["REGROUP_RANK"], got["REGROUP_WORLD_SIZE"], got["REGROUP_MASTER_PORT"]) == ("3", "6", "4000")


@pytest.mark.parametrize(
    ("processes", "num_gpus", "local_rank", "want"),
    [
        pytest.param(1, 0, 0, None, id="a CPU"),
        pytest.param(4, 4, 1, None, id="a GPU for each process is JAX's own rule"),
        pytest.param(1, 4, 0, "0,1,2,3", id="one process gets all"),
        pytest.param(2, 4, 1, "2,3", id="two get half of them each"),
    ],
)
def test_process_of_jax_gets_all_its_gpus(processes: int, num_gpus: int, local_rank: int, want: str | None) -> None:
    got = environment(frameworks.JAX, place(0, 1, local_rank, processes, num_gpus=num_gpus))
    assert got.get("JAX_LOCAL_DEVICE_IDS") == want


@pytest.mark.parametrize(
    ("framework", "on_cpu", "given", "want"),
    [
        pytest.param(frameworks.PYTORCH, True, None, "true", id="without a GPU Accelerate is told"),
        pytest.param(frameworks.DEEPSPEED, True, None, "true", id="also under DeepSpeed"),
        pytest.param(frameworks.PYTORCH, False, None, None, id="with a GPU it is not"),
        pytest.param(frameworks.PYTORCH, True, "false", "false", id="the user's word wins"),
        pytest.param(frameworks.JAX, True, None, None, id="JAX has no Accelerate"),
    ],
)
def test_accelerate_forms_a_group_on_cpus(framework: str, on_cpu: bool, given: str | None, want: str | None) -> None:
    environ = {env.FRAMEWORK: framework, **({} if given is None else {"ACCELERATE_USE_CPU": given})}
    got = trainer_env(
        environ, socket_path="/a", local_rank=0, processes=1, incarnation=1, restarts=0, place=place(on_cpu=on_cpu)
    )
    assert got.get("ACCELERATE_USE_CPU") == want


@pytest.mark.parametrize("framework", frameworks.ALL)
def test_lightning_is_told_how_many_nodes_and_devices_there_are(framework: str) -> None:
    """Without it Lightning refuses a world size that differs from its own arguments. What the user says wins."""
    got = environment(framework, place(1, 3, 1, 2))
    want = {name: "3" if name.endswith("NODES") else "2" for name in LIGHTNING if framework in frameworks.ON_TORCH}
    assert {name: value for name, value in got.items() if name.startswith(("PL_", "LT_"))} == want, "none of Fabric's"
    environ = {env.FRAMEWORK: framework, "PL_TRAINER_DEVICES": "7"}
    users = trainer_env(environ, socket_path="/a", local_rank=0, processes=1, incarnation=1, restarts=0, place=place())
    assert users["PL_TRAINER_DEVICES"] == "7"


def test_only_torch_is_imported_ahead_of_time() -> None:
    assert {name for name in frameworks.ALL if preload_modules({env.FRAMEWORK: name})} == frameworks.ON_TORCH
    assert preload_modules({env.FRAMEWORK: frameworks.JAX, env.PRELOAD: "numpy"}) == ["numpy"]


def test_operator_and_agent_have_the_same_names() -> None:
    assert get_args(api.Framework) == frameworks.ALL
    assert {name: names for name, names in frameworks.RESERVED.items() if names} == api.RESERVED_ENV
    assert api.MOST_LISTED == frameworks.MOST_LISTED
    assert {api.TENSORFLOW} == frameworks.LISTS_MEMBERS


# --- the list of members reaches the agent ---------------------------------------------------------------------------


def listing() -> Drive:
    """Return the agent of a script whose framework lists the members."""
    drive = Drive(framework=frameworks.TENSORFLOW).feed(ev.PortsOpened((7000,))).feed(ev.Connected())
    return drive.command(wire.Welcome("Script"))


def test_processes_wait_for_the_list_of_members() -> None:
    drive = listing().generation(1, world_size=2, document_digest=document(1, 2).digest()).wait(60)
    assert drive.of(ev.Start) == []
    drive.command(wire.DocumentCommand(document(1, 2)))
    assert [start.members for start in drive.of(ev.Start)] == [document(1, 2).members]
    assert drive.of(ev.YieldPorts) == [ev.YieldPorts()]
    assert drive.command(wire.DocumentCommand(document(1, 2))).of(ev.Start) == [], "started twice"


def test_list_that_came_before_the_old_processes_ended_is_used_then() -> None:
    drive = listing().generation(1, document_digest=document(1).digest()).command(wire.DocumentCommand(document(1)))
    drive.feed(ev.Spawned(0, drive.incarnations[0]))
    drive.generation(2, document_digest=document(2).digest()).command(wire.DocumentCommand(document(2)))
    assert drive.of(ev.Start) == []
    drive.exits(-15)
    assert [(start.generation.number, start.members) for start in drive.of(ev.Start) if start.generation] == [
        (2, document(2).members)
    ]


def test_no_process_starts_in_an_agent_that_is_leaving() -> None:
    drive = listing().generation(1, document_digest=document(1).digest()).wait(1).feed(ev.Terminated())
    assert drive.command(wire.DocumentCommand(document(1))).of(ev.Start) == []


@pytest.mark.parametrize(("framework", "after_s"), [(frameworks.PYTORCH, 120.0), (frameworks.JAX, 30.0)])
def test_who_forms_no_group_of_torch_counts_as_unobserved_sooner(framework: str, after_s: float) -> None:
    """The hook is in these processes, too, and never sees init_process_group."""
    drive = Drive(framework=framework).feed(ev.Connected()).command(wire.Welcome("Script")).generation(1, world_size=2)
    drive.feed(ev.Spawned(0, drive.incarnations[0])).says(local.Observed(0, drive.incarnations[0], "watched"))
    assert drive.wait(after_s - 1).report.condition.group == Group.WAITING
    assert drive.wait(2).report.condition.group == Group.UNOBSERVED


def test_ports_are_in_every_report() -> None:
    drive = listing()
    assert drive.report.ports == (7000,)
    assert wire.Report.decode(codec.line(drive.report)).ports == (7000,)
    assert Drive().report.ports is None


@pytest.mark.parametrize("ports", [(0,), (65536,), (7000, -1)])
def test_report_with_no_port_is_refused(ports: tuple[int, ...]) -> None:
    said = codec.line(dataclasses.replace(Drive().report, ports=ports))
    with pytest.raises(codec.ProtocolError, match=r"is no port. Send 1 to 65535"):
        wire.Report.decode(said)
