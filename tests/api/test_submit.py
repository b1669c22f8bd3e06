"""`regroup submit` against a real API server, through a real kubectl proxy. Nothing runs the pods: the tests write the status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import binaries
from harness.polling import until
from regroup_client import creation
from regroup_client.access import Target, connect
from regroup_client.api import Api as ClientApi
from regroup_client.api import Kind, Object
from regroup_client.errors import ApiError
from regroup_client.submission import KIND, Choices, Objects, objects
from tests.api.conftest import ROOT, Api

JOB = "dtj/train"


class Submit:
    """Runs `regroup submit` as users do: with kubectl on the PATH, and a kubeconfig."""

    def __init__(self, api: Api, namespace: str, directory: Path) -> None:
        self.directory, self._api, self._namespace = directory, api, namespace
        (directory / "train.py").write_text("print('hi')\n")
        self.environment = {
            **os.environ,
            "PATH": f"{binaries.ensure()}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer-image")),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start_command("submit", *arguments)

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start another command of `regroup`. Its first two words come before the options that name the cluster."""
        where = (f"--kubeconfig={self._api.kubeconfig}", f"--namespace={self._namespace}")
        head = [sys.executable, "-m", "regroup_cli", *arguments[:2], *where, *arguments[2:]]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            head, stdout=pipe, stderr=pipe, text=True, cwd=self.directory, env=self.environment, start_new_session=True
        )

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, error = process.communicate(timeout=90)
        return process.returncode, out, error

    def done(self, *arguments: str) -> str:
        code, out, error = self(*arguments)
        assert (code, error) == (0, "")
        return out

    def get(self, what: str) -> dict[str, Any]:
        return self._api.get(what, f"--namespace={self._namespace}")

    def is_there(self, what: str) -> bool:
        return self._api.kubectl("get", what, f"--namespace={self._namespace}").code == 0

    def status(self, state: str, *conditions: dict[str, str]) -> None:
        now = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"summary": {"state": state}, "conditions": [{**now, **one} for one in conditions]}
        patch = json.dumps({"status": status})
        self._api.done(
            "patch", JOB, f"--namespace={self._namespace}", "--subresource=status", "--type=merge", f"--patch={patch}"
        )


@pytest.fixture
def submit(api: Api, namespace: str, tmp_path: Path) -> Submit:
    return Submit(api, namespace, tmp_path)


def test_script_becomes_a_job_that_owns_its_files_but_not_its_checkpoints(submit: Submit) -> None:
    out = submit.done(
        "train.py",
        "--image=torch",
        "--workers=2",
        "--max=4",
        "--checkpoint=new:1Gi",
        "--env=A=B",
        "--detach",
        "--",
        "--lr",
        "1",
    )
    assert "# ConfigMap train-code-" in out
    assert yaml.safe_load(out.split("---\n")[1])["kind"] == KIND
    job = submit.get(JOB)
    assert (job["spec"]["replicas"], job["spec"]["elasticPolicy"]["maxReplicas"]) == (2, 4)
    trainer = job["spec"]["template"]["spec"]["containers"][0]
    assert (trainer["args"], trainer["env"]) == (["--lr", "1"], [{"name": "A", "value": "B"}])
    name = job["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
    code = submit.get(f"configmap/{name}")
    assert (code["data"], code["immutable"]) == ({"train.py": "print('hi')\n"}, True)
    assert [one["uid"] for one in code["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    claim = submit.get("pvc/train-checkpoints")
    assert "ownerReferences" not in claim["metadata"]


def test_same_command_again_changes_the_size_and_nothing_else_may_change(submit: Submit, tmp_path: Path) -> None:
    common = ("train.py", "--image=torch", "--max=4", "--checkpoint=new:1Gi", "--detach")
    submit.done(*common)
    submit.done(*common, "--workers=3")
    assert submit.get(JOB)["spec"]["replicas"] == 3
    (tmp_path / "train.py").write_text("print('changed')\n")
    code, _, error = submit(*common)
    assert code == 2
    assert "cannot change any more. Delete it, or give another --name." in error
    assert len(submit.get("configmap")["items"]) == 1


def test_claim_of_an_earlier_job_is_not_taken_for_a_new_one(submit: Submit, api: Api, namespace: str) -> None:
    common = ("train.py", "--image=torch", "--detach")
    submit.done(*common, "--checkpoint=new:1Gi")
    api.done("delete", JOB, f"--namespace={namespace}")
    code, _, error = submit(*common, "--checkpoint=new:1Gi")
    assert code == 2
    assert "give --checkpoint train-checkpoints" in error
    submit.done(*common, "--checkpoint=train-checkpoints")


def test_ended_job_is_not_submitted_again(submit: Submit) -> None:
    common = ("train.py", "--image=torch", "--detach")
    submit.done(*common)
    submit.status("Succeeded")
    code, _, error = submit(*common)
    assert (code, error) == (
        2,
        "regroup: The job train exists and has ended (Succeeded). Delete it, or give another --name.\n",
    )


def test_dry_run_stores_nothing(submit: Submit) -> None:
    out = submit.done("train.py", "--image=torch", "--checkpoint=new:1Gi", "--dry-run")
    assert out.endswith("# The API server accepts this. Nothing was created.\n")
    assert not submit.is_there(JOB)
    assert not submit.is_there("pvc/train-checkpoints")


def test_refusal_of_the_api_server_is_its_own_sentence_and_nothing_is_left(
    submit: Submit, api: Api, namespace: str
) -> None:
    limit = {"type": "PersistentVolumeClaim", "max": {"storage": "500Mi"}}
    small = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [limit]}}
    api.done("create", f"--namespace={namespace}", "--filename=-", document=small)
    code, _, error = submit("train.py", "--image=torch", "--checkpoint=new:1Gi", "--detach")
    assert code == 1
    assert "maximum storage usage per PersistentVolumeClaim is 500Mi" in error
    assert error.count("\n") == 1
    assert not submit.is_there(JOB)


def test_saved_manifest_is_submitted_later(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "train.py").write_text("import pkg.a\n")
    (tmp_path / "src" / "pkg" / "a.py").write_text("A = 'ä'\n\n")
    (tmp_path / "src" / "data.bin").write_bytes(bytes(range(256)))
    submit.done("train.py", "--directory=src", "--image=torch", "--checkpoint=new:1Gi", "--save=job.yaml")
    assert not submit.is_there(JOB)
    submit.done("job.yaml", "--detach")
    job = submit.get(JOB)
    (code,) = [one for one in submit.get("configmap")["items"] if one["metadata"].get("ownerReferences")]
    assert code["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert code["data"] == {"train.py": "import pkg.a\n", "pkg__a.py": "A = 'ä'\n\n"}
    assert list(code["binaryData"]) == ["data.bin"]
    assert submit.is_there("pvc/train-checkpoints")


def test_as_much_as_may_travel_fits_into_a_config_map(submit: Submit, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").write_text("")
    for number in range(299):
        (source / f"{'x' * 60}-{number}.bin").write_bytes(os.urandom(3080))
    submit.done("train.py", "--directory=src", "--image=torch", "--detach")
    name = submit.get(JOB)["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
    assert len(submit.get(f"configmap/{name}")["binaryData"]) == 299


class Broken(ClientApi):
    """An API server that fails when the ConfigMap is to be stored."""

    error: BaseException = ApiError(500, "Broken", "It is broken.")

    def apply(self, kind: Kind, item: Object, *, dry_run: bool = False, force: bool = False) -> Object:
        if item["kind"] == "ConfigMap" and not dry_run:
            raise self.error
        return super().apply(kind, item, dry_run=dry_run, force=force)


@pytest.fixture
def broken(submit: Submit, api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broken]:
    monkeypatch.setenv("PATH", submit.environment["PATH"])
    with connect(Target(namespace=namespace, kubeconfig=str(api.kubeconfig))) as found:
        yield Broken(found._route, found.namespace)


@pytest.mark.parametrize("error", [Broken.error, KeyboardInterrupt()], ids=["refused", "Ctrl-C"])
def test_job_is_deleted_if_a_later_step_fails(submit: Submit, broken: Broken, error: BaseException) -> None:
    broken.error = error
    made = objects(Choices("train", "torch", "train.py", checkpoint="new:1Gi"), {"train.py": b""})
    with pytest.raises(type(error)):
        creation.create(broken, made)
    assert not submit.is_there(JOB)
    assert not submit.is_there("pvc/train-checkpoints")


def test_job_of_another_command_stays_if_a_step_of_this_one_fails(
    submit: Submit, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = creation.check

    def check(api: ClientApi, made: Objects) -> Object | None:
        found = checked(api, made)
        submit.done("train.py", "--image=torch", "--detach")  # between the check and the creation
        return found

    monkeypatch.setattr(creation, "check", check)
    made = objects(Choices("train", "torch", "train.py"), {"train.py": b"print('hi')\n"})
    with pytest.raises(ApiError, match="It is broken"):
        creation.create(broken, made)
    assert submit.is_there(JOB)


def test_job_that_was_there_stays_if_a_step_fails(submit: Submit, broken: Broken) -> None:
    submit.done("train.py", "--image=torch", "--detach")
    made = objects(Choices("train", "torch", "train.py"), {"train.py": b"print('hi')\n"})
    with pytest.raises(ApiError, match="It is broken"):
        creation.create(broken, made)
    assert submit.is_there(JOB)


@pytest.mark.parametrize(
    ("state", "condition", "code"),
    [
        ("Running", {"type": "Training", "status": "True", "reason": "Running", "message": "It trains."}, 0),
        ("Succeeded", {"type": "Complete", "status": "True", "reason": "Finished", "message": "Done."}, 0),
        ("Failed", {"type": "Failed", "status": "True", "reason": "CannotRun", "message": "No torch."}, 1),
    ],
    ids=["trains", "succeeds", "fails"],
)
def test_job_is_followed_until_it_trains(submit: Submit, state: str, condition: dict[str, str], code: int) -> None:
    with submit.start("train.py", "--image=torch") as process:
        until(lambda: submit.is_there(JOB), "the job", timeout_s=60)
        submit.status("Starting")
        submit.status(state, condition)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, "")
    assert f"  {state}" in out
    assert ("No torch." in out) == (state == "Failed")


def test_ctrl_c_ends_the_following_and_the_job_goes_on(submit: Submit) -> None:
    with submit.start("train.py", "--image=torch") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "AwaitingOperator" in line:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")
    assert "The job goes on. To look at it: kubectl regroup watch train" in out
    assert submit.is_there(JOB)


def test_deleted_job_ends_the_following(submit: Submit, api: Api, namespace: str) -> None:
    with submit.start("train.py", "--image=torch") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "AwaitingOperator" in line:
                break
        api.done("delete", JOB, f"--namespace={namespace}")
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, "regroup: The job train was deleted.\n")


@pytest.mark.parametrize("sample", ["digits", "script"])
def test_sample_is_submitted(submit: Submit, sample: str) -> None:
    submit.done(str(ROOT / "manifests" / "samples" / f"{sample}.yaml"), "--detach")
    assert submit.is_there(f"dtj/{sample}")
