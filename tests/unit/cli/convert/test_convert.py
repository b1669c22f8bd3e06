"""Rules of `regroup convert` one by one, and its command line."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from regroup_cli.__main__ import main
from regroup_cli.convert.documents import Converted, Options, as_yaml, convert, read_documents
from regroup_cli.convert.findings import Verdict
from regroup_operator.api import SpecError, parse_job
from tests.unit.cli.convert.golden import EXAMPLES

Object = dict[str, Any]


def pytorchjob(**spec: Any) -> Object:
    container = {"name": "pytorch", "image": "registry.example/train:1", "command": ["torchrun", "train.py"]}
    template = {"spec": {"containers": [container]}}
    replicas = {"Worker": {"replicas": 2, "template": template}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"pytorchReplicaSpecs": copy.deepcopy(replicas), **spec},
    }


def trainjob(**trainer: Any) -> Object:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "train"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {"command": ["torchrun", "train.py"], "numNodes": 2, **trainer},
        },
    }


def container_of(job: Object) -> Object:
    found: Object = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return found


def one(document: Object, *others: Object, options: Options | None = None) -> Converted:
    """Return the only job of documents."""
    (found,) = [made for made in convert([document, *others], options or Options()) if made.findings]
    return found


def spec_of(document: Object) -> Object:
    spec: Object = one(document).document["spec"]
    return spec


def said(found: Converted, path: str) -> list[Verdict]:
    return [one.verdict for one in found.findings if one.path == path]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        pytest.param({"nprocPerNode": "2"}, {"processesPerWorker": 2}, id="a number of processes"),
        pytest.param({"nprocPerNode": "auto"}, {}, id="as many processes as GPUs"),
        pytest.param(
            {"elasticPolicy": {"maxReplicas": 3}},
            {"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}, "replicas": 3},
            id="a range is completed as in Kubeflow",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "maxRestarts": 7}},
            {
                "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4},
                "recovery": {"maxRestarts": 7, "windowSeconds": 31_536_000},
            },
            id="restarts of the whole job",
        ),
        pytest.param({"runPolicy": {"suspend": True}}, {"runPolicy": {"suspend": True}}, id="suspended"),
        pytest.param(
            {"runPolicy": {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 9}},
            {"runPolicy": {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 9}},
            id="what is left after the end",
        ),
        pytest.param({"runPolicy": {"managedBy": "kubeflow.org/training-operator"}}, {}, id="its own controller"),
        pytest.param(
            {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
            {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
            id="another controller",
        ),
    ],
)
def test_fields_of_a_pytorchjob(spec: Object, wanted: Object) -> None:
    document = pytorchjob(**spec)
    if "replicas" in wanted:
        document["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = wanted["replicas"]
    found = spec_of(document)
    assert {name: value for name, value in found.items() if name != "template"} == {"replicas": 2, **wanted}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("OnFailure", None),
        ("Always", None),
        ("Never", {"maxRestarts": 0}),
    ],
)
def test_restart_policy_of_the_only_replicas(policy: str, wanted: Object | None) -> None:
    document = pytorchjob()
    document["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = policy
    assert spec_of(document).get("recovery") == wanted


def test_restart_policy_exit_code_fails_by_codes_and_restarts_after_signals() -> None:
    document = pytorchjob()
    document["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "ExitCode"
    restart, fail = spec_of(document)["recovery"]["onExit"]
    assert (restart["action"], "SIGUSR1" in restart["signals"]) == ("Restart", True)
    assert fail == {"action": "Fail", "exitCodes": {"operator": "NotIn", "values": [0]}}


def test_master_and_worker_with_the_same_template_become_workers() -> None:
    document = pytorchjob()
    specs = document["spec"]["pytorchReplicaSpecs"]
    specs["Master"] = {"template": copy.deepcopy(specs["Worker"]["template"])}
    found = one(document)
    assert found.document["spec"]["replicas"] == 3
    assert found.dropped == 0


def test_what_differs_between_master_and_worker_is_dropped_by_name() -> None:
    document = pytorchjob()
    specs = document["spec"]["pytorchReplicaSpecs"]
    specs["Master"] = {"template": copy.deepcopy(specs["Worker"]["template"])}
    specs["Master"]["template"]["spec"]["nodeSelector"] = {"disk": "ssd"}
    container_of(document)["image"] = "registry.example/other:1"
    found = one(document)
    root = "spec.pytorchReplicaSpecs"
    assert said(found, f"{root}.Worker.template.spec.containers[0].image") == [Verdict.DROPPED]
    assert Verdict.CHANGED in said(found, f"{root}.Master.template.spec.nodeSelector")
    assert found.document["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert found.document["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/train:1"


@pytest.mark.parametrize(
    "path",
    ["spec.novel", "spec.runPolicy.novel", "spec.elasticPolicy.novel", "spec.pytorchReplicaSpecs.Worker.novel",
     "spec.pytorchReplicaSpecs.Worker.template.metadata.novel", "metadata.novel", "novel"],
)  # fmt: skip
def test_a_field_without_a_rule_is_reported_as_dropped(path: str) -> None:
    document = pytorchjob(runPolicy={}, elasticPolicy={"minReplicas": 2, "maxReplicas": 2})
    target = document
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = {"deep": [1]}
    found = one(document)
    assert [(one.path, one.verdict) for one in found.findings if "novel" in one.path] == [
        (f"{path}.deep[0]", Verdict.DROPPED)
    ]


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        pytest.param({"name": "MASTER_ADDR", "value": "a"}, False, id="set by Regroup"),
        pytest.param({"name": "WORLD_SIZE", "value": "2"}, False, id="a number that changes"),
        pytest.param({"name": "PET_RDZV_ENDPOINT", "value": "a:1"}, False, id="rendezvous of torchrun"),
        pytest.param({"name": "NCCL_DEBUG", "value": "INFO"}, True, id="the user's own"),
        pytest.param(
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}, True, id="from a Secret"
        ),
    ],
)
def test_variables_that_regroup_sets_are_left_out(env: Object, kept: bool) -> None:
    document = pytorchjob()
    container_of(document)["env"] = [env]
    found = one(document)
    assert found.document["spec"]["template"]["spec"]["containers"][0].get("env") == ([env] if kept else None)
    (verdict,) = [x.verdict for x in found.findings if x.path.endswith("env[0]")]
    assert verdict is (Verdict.MAPPED if kept else Verdict.UNNEEDED)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        pytest.param(
            ["torchrun", "--nnodes=2", "--node_rank=$(RANK)", "--master-addr", "$(MASTER_ADDR)", "train.py", "--master-port", "1"],
            ["torchrun", "--nnodes=2", "train.py", "--master-port", "1"],
            id="options of the rendezvous, but not the program's",
        ),
        pytest.param(
            ["bash", "-xc", "torchrun --nnodes=$PET_NNODES \\\n  train.py --name 'a $b' --out $OUT"],
            ["torchrun", "train.py", "--name", "a $b", "--out", "$(OUT)"],
            id="a shell around torchrun",
        ),
        pytest.param(
            ["sh", "-c", "set -e; cd /src && exec torchrun train.py"], ["torchrun", "train.py"], id="a directory"
        ),
        pytest.param(
            ["sh", "-c", "A='--lr 1'; torchrun train.py $A \"$A\""],
            ["torchrun", "train.py", "--lr", "1", "--lr 1"],
            id="a value that is split",
        ),
        pytest.param(
            ["sh", "-c", "python train.py --rank $RANK"], ["sh", "-c", "python train.py --rank $RANK"], id="no launcher"
        ),
    ],
)  # fmt: skip
def test_command_of_a_launcher(command: list[str], wanted: list[str]) -> None:
    document = pytorchjob()
    container_of(document).update(command=command, env=[{"name": "OUT", "value": "/out"}])
    container = spec_of(document)["template"]["spec"]["containers"][0]
    assert container["command"] == wanted
    assert container.get("workingDir") == ("/src" if "/src" in str(command) else None)


def test_a_program_that_is_no_launcher_keeps_one_process_in_each_pod() -> None:
    document = pytorchjob()
    container_of(document).update(command=["python", "train.py"], resources={"limits": {"nvidia.com/gpu": 4}})
    assert spec_of(document)["processesPerWorker"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            {"command": ["sh", "-c", "pip install x && torchrun train.py"]}, "from a shell", id="a shell that does more"
        ),
        pytest.param({"command": None}, "has no command", id="the image's own command"),
        pytest.param({"image": None}, "Give --image", id="no image"),
        pytest.param({"command": ["torchrun", "--nnodes=5", "train.py"]}, "--nnodes", id="another size"),
    ],
)
def test_what_the_operator_would_refuse_is_refused(change: Object, sentence: str) -> None:
    document = pytorchjob()
    container_of(document).update(change)
    for name in [name for name, value in change.items() if value is None]:
        del container_of(document)[name]
    with pytest.raises(SpecError, match=sentence) as refused:
        convert([document], Options())
    assert str(refused.value).startswith("PyTorchJob train: ")


def test_trainjob_takes_its_runtime_from_the_files_and_names_it_if_it_is_missing() -> None:
    document = trainjob()
    document["spec"]["runtimeRef"] = {"kind": "TrainingRuntime", "name": "ours"}
    with pytest.raises(SpecError, match="kubectl get trainingruntime ours -o yaml"):
        convert([document], Options())
    job = {
        "name": "node",
        "template": {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": "ours:1"}]}}}},
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "ours"},
        "spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [job], "novel": 1}}},
    }
    found = one(document, runtime)
    assert found.document["spec"]["template"]["spec"]["containers"][0]["image"] == "ours:1"
    assert [x.path for x in found.findings if x.verdict is Verdict.DROPPED] == [
        "TrainingRuntime ours: spec.template.spec.novel"
    ]


@pytest.mark.parametrize("kind", ["podTemplateOverrides", "podSpecOverrides"])
def test_overrides_of_earlier_trainers(kind: str) -> None:
    pod = {"serviceAccountName": "trainer", "containers": [{"name": "node", "env": [{"name": "A", "value": "1"}]}]}
    override = {"targetJobs": [{"name": "node"}], **({"spec": pod} if kind == "podTemplateOverrides" else pod)}
    document = trainjob()
    document["spec"][kind] = [override]
    found = one(document)
    assert found.dropped == 0
    spec = found.document["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "trainer"
    assert spec["containers"][0]["env"] == [{"name": "A", "value": "1"}]


def test_command_writes_the_job_to_stdout_and_the_report_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = yaml.safe_dump(pytorchjob(novel=1))
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["convert", "-"]) == 0
    written = capsys.readouterr()
    job = yaml.safe_load(written.out)
    parse_job(job)
    assert "  dropped   spec.novel: " in written.err
    assert "0 dropped" not in written.err
    source = tmp_path / "job.yaml"
    source.write_text(text)
    output = tmp_path / "out.yaml"
    assert main(["convert", str(source), "--strict", "-o", str(output)]) == 1
    assert not output.exists()
    assert capsys.readouterr().out == ""
    assert main(["convert", str(source), "-o", str(output), "--name", "other", "--framework", "DeepSpeed"]) == 0
    job = yaml.safe_load(output.read_text())
    assert (job["metadata"]["name"], job["spec"]["framework"]) == ("other", "DeepSpeed")
    assert main(["convert", str(source), "--strict"]) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is no YAML in line 1"),
        ("- 1", "without a kind"),
        ("", "There is no job to convert"),
        ("kind: ConfigMap\napiVersion: v1\nmetadata: {name: a}", "There is no job to convert"),
        ("kind: RayJob\napiVersion: ray.io/v1\nmetadata: {name: a}", "RayJob a of ray.io/v1 cannot be converted"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1\nmetadata: {name: a}\nspec: 3", "spec is no mapping"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1\nmetadata: {name: a}", "neither a Master nor a Worker"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1", "metadata.name is missing"),
    ],
)
def test_a_file_that_cannot_be_converted_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "job.yaml"
    source.write_text(text)
    assert main(["convert", str(source)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert main(["convert", str(tmp_path / "none.yaml")]) == 2


def test_times_stay_as_they_are_written() -> None:
    (found,) = read_documents("kind: A\nat: 2026-11-28T16:00:00Z", "file")
    assert found["at"] == "2026-11-28T16:00:00Z"


def test_every_example_is_a_job_that_the_operator_accepts() -> None:
    examples = list(EXAMPLES.glob("*.job.yaml"))
    assert len(examples) > 3
    for example in examples:
        for document in yaml.safe_load_all(example.read_text()):
            if document["kind"] == "DistributedTrainingJob":
                parse_job(document)


# --- other kinds -----------------------------------------------------------------------------------------------------


def mpijob(launcher: Object, version: str = "v2beta1", **spec: Any) -> Object:
    def template(container: Object) -> Object:
        return {"spec": {"containers": [{"name": "mpi", "image": "registry.example/train:1", **container}]}}

    types = {"Launcher": {"template": template(launcher)}, "Worker": {"replicas": 2, "template": template({})}}
    return {
        "apiVersion": f"kubeflow.org/{version}",
        "kind": "MPIJob",
        "metadata": {"name": "train"},
        "spec": {"slotsPerWorker": 2, "mpiReplicaSpecs": types, **spec},
    }


@pytest.mark.parametrize(
    ("launcher", "spec", "wanted"),
    [
        pytest.param(
            ["mpirun", "-np", "4", "python", "t.py"], {}, {"replicas": 2, "processesPerWorker": 2}, id="mpirun"
        ),
        pytest.param(
            ["mpirun", "-np", "6", "python", "t.py"],
            {"runLauncherAsWorker": True},
            {"replicas": 3, "processesPerWorker": 2},
            id="the launcher trains, too",
        ),
        pytest.param(
            ["horovodrun", "-np", "4", "--min-np", "2", "--max-np", "8", "python", "t.py"],
            {},
            {
                "replicas": 2,
                "processesPerWorker": 2,
                "framework": "Horovod",
                "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4},
            },
            id="an elastic horovodrun",
        ),
        pytest.param(
            ["bash", "-c", "mpirun -np 4 python t.py"],
            {"runPolicy": {"backoffLimit": 2}},
            {"replicas": 2, "processesPerWorker": 2, "recovery": {"maxRestarts": 2, "windowSeconds": 31_536_000}},
            id="a shell around mpirun",
        ),
    ],
)
def test_mpijob(launcher: list[str], spec: Object, wanted: Object) -> None:
    found = one(mpijob({"command": launcher}, **spec))
    assert {name: value for name, value in found.document["spec"].items() if name != "template"} == wanted
    assert found.dropped == 0
    assert found.document["spec"]["template"]["spec"]["containers"][0]["command"][0] in ("mpirun", "horovodrun")


def test_mpijob_of_another_number_of_processes_is_refused() -> None:
    with pytest.raises(SpecError, match="3 processes in the command"):
        one(mpijob({"command": ["mpirun", "-np", "3", "python", "t.py"]}))


def test_launcher_of_the_first_version_fails_the_job() -> None:
    document = mpijob({"command": ["mpirun", "python", "t.py"]}, version="v1", cleanPodPolicy="All")
    spec = spec_of(document)
    assert (spec["recovery"], spec["runPolicy"]) == ({"maxRestarts": 0}, {"cleanPodPolicy": "All"})


def tfjob(**types: int) -> Object:
    container = {"name": "tensorflow", "image": "registry.example/tf:1", "command": ["python", "t.py"]}
    specs = {
        name: {"replicas": count, "template": {"spec": {"containers": [dict(container)]}}}
        for name, count in types.items()
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": "t"},
        "spec": {"tfReplicaSpecs": specs},
    }


def test_tfjobs_chief_is_a_worker_and_its_evaluator_a_role() -> None:
    spec = spec_of(tfjob(Chief=1, Worker=2, Evaluator=1))
    assert (spec["framework"], spec["replicas"], spec["roles"][0]["name"]) == ("TensorFlow", 3, "evaluator")


def test_parameter_servers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"spec.tfReplicaSpecs.PS asks for parameter servers"):
        one(tfjob(PS=1, Worker=2))


def test_dynamic_workers_are_dropped_if_they_are_asked_for() -> None:
    document = tfjob(Worker=2)
    document["spec"].update(enableDynamicWorker=True, successPolicy="AllWorkers")
    assert one(document).dropped == 1
    document["spec"]["enableDynamicWorker"] = False
    assert one(document).dropped == 0


def test_command_of_the_image_is_given_on_the_command_line() -> None:
    document = tfjob(Worker=2)
    container = document["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["args"] = [container.pop("command")[1]]
    with pytest.raises(SpecError, match="--command"):
        one(document)
    made = one(document, options=Options(command="python -u")).document["spec"]["template"]["spec"]["containers"][0]
    assert (made["command"], made["args"]) == (["python", "-u"], ["t.py"])


def jobset(*jobs: Object, **spec: Any) -> Object:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "t"},
        "spec": {"replicatedJobs": list(jobs), **spec},
    }


def replicated(name: str, replicas: int = 1, env: str = "A", **job: Any) -> Object:
    container = {"name": "c", "image": "i:1", "command": ["python", "t.py"], "env": [{"name": env, "value": "1"}]}
    return {
        "name": name,
        "replicas": replicas,
        "template": {"spec": {**job, "template": {"spec": {"containers": [container]}}}},
    }


def test_jobsets_workers_are_all_pods_of_the_job_that_trains() -> None:
    assert spec_of(jobset(replicated("slice", 2, parallelism=4)))["replicas"] == 8


def test_the_replicated_job_that_trains_is_found_by_its_name_or_its_size() -> None:
    small, large = replicated("driver"), replicated("ranks", parallelism=3)
    assert spec_of(jobset(small, large))["replicas"] == 3
    assert (
        spec_of(jobset(replicated("Eval_Pods", parallelism=3), replicated("trainer")))["roles"][0]["name"] == "evalpods"
    )


@pytest.mark.parametrize(
    ("policy", "required"),
    [(None, True), ({"operator": "All"}, True), ({"operator": "All", "targetReplicatedJobs": ["workers"]}, None),
     ({"operator": "Any"}, None)],
)  # fmt: skip
def test_roles_are_required_as_the_success_policy_says(policy: Object | None, required: bool | None) -> None:
    spec = spec_of(jobset(replicated("workers", 2), replicated("eval"), successPolicy=policy))
    assert spec["roles"][0].get("requiredForCompletion") is required


@pytest.mark.parametrize(
    ("limit", "restarts", "wanted"), [(0, None, 0), (None, 3, 27), (1, 2, 5), (0, 4, 4), (None, None, None)]
)
def test_retries_of_jobs_and_of_their_set(limit: int | None, restarts: int | None, wanted: int | None) -> None:
    document = jobset(replicated("w", backoffLimit=limit), failurePolicy={"maxRestarts": restarts})
    assert (spec_of(document).get("recovery") or {}).get("maxRestarts") == wanted


@pytest.mark.parametrize(
    ("variable", "framework"), [("TF_CONFIG", "TensorFlow"), ("JAX_COORDINATOR_ADDRESS", "JAX"), ("A", None)]
)
def test_framework_of_a_jobset_is_that_of_its_variables(variable: str, framework: str | None) -> None:
    spec = spec_of(jobset(replicated("w", env=variable)))
    assert spec.get("framework") == framework
    assert ("env" in spec["template"]["spec"]["containers"][0]) == (framework is None)


@pytest.mark.parametrize(
    "text",
    ["1e-4", "+5e3", ".5", "1.", "0o17", "017", "0x1F", "0b11", "1_000", "y", "N", "yes", "off", "null", "~", "-.inf",
     "12:30:45", "2020-01-01"],
)  # fmt: skip
def test_text_that_looks_like_another_value_is_written_with_quotes(text: str) -> None:
    """PyYAML writes some of them without, and kubectl would then read a number or a boolean where a text must stand."""
    assert as_yaml([{"value": text}]) == f"value: '{text}'\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("1e3", 1000.0),
        ("0o17", 15),
        ("y", True),
        ("2020-01-01", "2020-01-01"),
    ],
)
def test_values_are_read_as_kubectl_reads_them(text: str, value: Any) -> None:
    (found,) = read_documents(f"kind: A\nvalue: {text}", "f")
    assert found["value"] == value
    assert type(found["value"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("value: &it {it: *it}", id="contains itself"),
        pytest.param(
            "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
            id="aliases of aliases",
        ),
    ],
)
@pytest.mark.timeout(20)
def test_values_without_bound_are_one_sentence(text: str) -> None:
    with pytest.raises(SpecError, match="an alias that contains itself"):
        read_documents(f"kind: A\n{text}", "f")


def test_prefix_of_names_is_said_to_be_a_name() -> None:
    job = pytorchjob()
    job["metadata"] = {"generateName": "train-"}
    found = one(job)
    assert found.document["metadata"]["name"] == "train"
    assert any("a second job needs another one" in finding.sentence for finding in found.findings)
