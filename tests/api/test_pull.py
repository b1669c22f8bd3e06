"""`regroup checkpoint pull` against a real API server without kubelets: what is created and deleted, and why it gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.polling import until
from tests.api.conftest import Api
from tests.api.test_submit import Submit


@pytest.fixture
def submit(api: Api, namespace: str, tmp_path: Path) -> Submit:
    """A job that has a claim, in a namespace that enforces Pod Security "restricted"."""
    api.done("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    made = Submit(api, namespace, tmp_path)
    made.done("train.py", "--image=torch", "--checkpoint=new:1Gi", "--user=1000", "--detach")
    return made


def test_pod_is_admitted_waited_for_and_deleted(submit: Submit, api: Api, namespace: str, tmp_path: Path) -> None:
    with submit.start_command("checkpoint", "pull", "--wait=2", "train", "into") as process:
        selector = ("pods", "--selector=regroup.dev/pull-of=train", f"--namespace={namespace}")
        until(lambda: bool(api.get(*selector)["items"]), "the pod", timeout_s=60)
        (pod,) = api.get(*selector)["items"]
        _, error = process.communicate(timeout=60)
    assert pod["metadata"]["ownerReferences"][0]["uid"] == submit.get("dtj/train")["metadata"]["uid"]
    said, why = error.splitlines()
    assert said == f"The pod {pod['metadata']['name']} reads the claim train-checkpoints."
    assert why.endswith("did not start in 2 s: no kubelet has begun with it. Try again with a longer --wait.")
    assert process.returncode == 1
    assert api.get(*selector)["items"] == []
    assert not (tmp_path / "into").exists()


def test_export_of_a_job_leaves_no_file_if_the_pod_does_not_start(submit: Submit, tmp_path: Path) -> None:
    with submit.start_command("checkpoint", "export", "--wait=1", "train", "--to=model.safetensors") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "did not start in 1 s" in error
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_job_that_is_not_there_is_one_sentence(submit: Submit, namespace: str) -> None:
    with submit.start_command("checkpoint", "pull", "none", "into") as process:
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (
        1,
        f"regroup: The namespace {namespace} has no job none. `kubectl regroup list -A` shows all.\n",
    )
