"""The job under construction, and the rules for its name and metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regroup_cli.convert.findings import Field, Finding
from regroup_operator.api import GROUP, KIND, VERSION, SpecError
from regroup_operator.api.frameworks import PYTORCH
from regroup_operator.api.names import MAX_JOB_NAME

_ORDER = (
    "framework",
    "replicas",
    "elasticPolicy",
    "processesPerWorker",
    "runPolicy",
    "recovery",
    "network",
    "roles",
    "template",
)
_ANOTHER_OPERATORS = ("kubeflow.org/", "trainer.kubeflow.org/", "training.kubeflow.org/", "jobset.sigs.k8s.io/",
                      "batch.kubernetes.io/", "regroup.dev/")  # fmt: skip
"""Prefixes of labels and annotations that an operator sets."""
_POD_GROUPS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/", "scheduling.x-k8s.io/pod-group",
               "scheduling.sigs.k8s.io/", "pod-group.scheduling.sigs.k8s.io", "volcano.sh/")  # fmt: skip
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/"
_SERVERS = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "ownerReferences",
            "finalizers", "deletionTimestamp", "deletionGracePeriodSeconds")  # fmt: skip
NO_GANG = "Regroup makes no pod groups, so pods are scheduled one by one. A job of fixed size trains once all its workers run."


@dataclass
class Draft:
    """A DistributedTrainingJob under construction."""

    metadata: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    framework: str = PYTORCH
    command: Sequence[str] | None = None
    """The command of the command line, for an image whose own command the source relies on."""
    beside: Sequence[Mapping[str, Any]] = ()
    """All documents of the files, in which a job may name others."""
    more: list[Finding] = field(default_factory=list)
    """The findings on other documents that the job was made from."""

    def put(self, path: str, value: Any) -> None:
        """Set a field below spec, such as runPolicy.suspend. None leaves it as it is."""
        if value is None:
            return
        *parents, last = path.split(".")
        target = self.spec
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value

    def take(self, source: Field, path: str) -> None:
        """Set a field below spec to the value of a field that means the same."""
        self.put(path, source.mapped(f"spec.{path}"))

    @property
    def trainer(self) -> dict[str, Any]:
        """The container that runs the training program."""
        containers: list[dict[str, Any]] = self.spec["template"]["spec"]["containers"]
        return next((one for one in containers if one.get("name") == "trainer"), containers[0])

    def job(self) -> dict[str, Any]:
        """Return the resource."""
        if self.framework != PYTORCH:
            self.spec["framework"] = self.framework
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": self.metadata,
            "spec": {name: self.spec[name] for name in _ORDER if name in self.spec},
        }


def take_metadata(document: Field, draft: Draft) -> None:
    """Convert the metadata of a document that is one job."""
    metadata = document.at("metadata")
    document.at("apiVersion").known()
    document.at("kind").known()
    document.at("status").unneeded("The controller of the source wrote it.")
    name, prefix = metadata.at("name"), metadata.at("generateName")
    if not name and not prefix:
        raise SpecError("metadata.name is missing. Add it.")
    draft.metadata["name"] = legal_name(name if name else prefix)
    if prefix and not name:
        prefix.note("It is the whole name here, so a second job needs another one.")
    if namespace := metadata.at("namespace").mapped("metadata.namespace"):
        draft.metadata["namespace"] = namespace
    for one in _SERVERS:
        metadata.at(one).unneeded("The API server, or a controller, wrote it.")
    for kind in ("labels", "annotations"):
        if kept := keep_marks(metadata.at(kind), f"metadata.{kind}"):
            draft.metadata[kind] = kept


def legal_name(source: Field) -> str:
    """Return a legal name for the job, and record what became of the source's name."""
    text = source.text()
    made = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    made = (made if made[:1].isalpha() else f"job-{made}")[:MAX_JOB_NAME].rstrip("-")
    if made == text:
        source.mapped("metadata.name")
    else:
        source.changed(f"The job's name is {made}: at most {MAX_JOB_NAME} of a-z, 0-9 and -, first a letter.")
    return made


def keep_marks(marks: Field, to: str) -> dict[str, str]:
    """Return the labels or annotations that the job, or its pods, should have."""
    kept = {}
    for name, one in marks.fields():
        if name == "kubectl.kubernetes.io/last-applied-configuration":
            one.unneeded("kubectl wrote it.")
        elif name.startswith(_POD_GROUPS):
            one.dropped(NO_GANG)
        elif name.startswith(_EXCLUSIVE):
            one.dropped(
                "Regroup places no group of pods on a domain of its own. Set affinity or topologySpreadConstraints in "
                "spec.template.spec."
            )
        elif name.startswith("kueue.x-k8s.io/"):
            kept[name] = one.changed(
                f"It is {to} of the job. Kueue can admit the job by spec.runPolicy.suspend, but give its pods no node selectors."
            )
        elif name.startswith(_ANOTHER_OPERATORS):
            one.unneeded("An operator sets it.")
        else:
            kept[name] = one.mapped(f"{to}[{name}]")
    return kept
