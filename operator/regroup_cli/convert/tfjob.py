"""The rules for a TFJob of kubeflow.org/v1."""

from __future__ import annotations

from regroup_cli.convert.draft import Draft, take_metadata
from regroup_cli.convert.findings import Field
from regroup_cli.convert.kubeflow import Replicas, replicas_of, take_priority, take_run_policy, take_workers
from regroup_cli.convert.launch import take_launch
from regroup_cli.convert.pod import role_template
from regroup_operator.api import SpecError
from regroup_operator.api.frameworks import EVALUATOR, TENSORFLOW

_RESTARTS = {"ExitCode": "OnFailure"}


def convert(document: Field, draft: Draft) -> None:
    """Convert a TFJob. Its chief is the worker with the index 0, as TensorFlow has it."""
    draft.framework = TENSORFLOW
    take_metadata(document, draft)
    spec = document.at("spec")
    types = replicas_of(spec.at("tfReplicaSpecs"), ("Chief", "Master", "Worker", "PS", "Evaluator"))
    if "PS" in types and types["PS"].count:
        raise SpecError(
            f"{types['PS'].source} asks for parameter servers, and no pods of a job are servers only. Train with "
            "MultiWorkerMirroredStrategy and remove PS, or let some workers be servers (docs/how-to/frameworks.md)."
        )
    workers = [types[name] for name in ("Chief", "Master", "Worker") if name in types]
    if not workers:
        raise SpecError("spec.tfReplicaSpecs has neither a Chief nor a Worker. Add one.")
    take_workers(workers, draft, ("tensorflow",), default="Never")
    if "Evaluator" in types:
        _take_evaluator(types["Evaluator"], draft)
    take_run_policy(spec.at("runPolicy"), draft)
    take_priority(spec.at("runPolicy"), draft)
    policy = spec.at("successPolicy")
    if policy.value == "AllWorkers":
        policy.unneeded("The job is Complete once its program has returned 0 in every worker.")
    else:
        policy.note(
            "The TFJob ends with its chief. This job is Complete once its program has returned 0 in every worker."
        )
        policy.known()
    if spec.at("enableDynamicWorker").value:
        spec.at("enableDynamicWorker").dropped("Set spec.elasticPolicy with the fewest and the most workers.")
    spec.at("enableDynamicWorker").known()
    take_launch(draft, workers[0].source.at("template", "spec", "containers"))


def _take_evaluator(evaluator: Replicas, draft: Draft) -> None:
    source = evaluator.source
    to = f"spec.roles[{EVALUATOR}]"
    source.at("replicas").mapped(f"{to}.replicas")
    template = role_template(source.at("template"), to)
    policy = source.at("restartPolicy").text()
    source.at("restartPolicy").mapped(f"{to}.template.spec.restartPolicy") if policy not in _RESTARTS else source.at(
        "restartPolicy"
    ).changed("It is OnFailure: a container that fails starts again.")
    if policy:
        template["spec"]["restartPolicy"] = _RESTARTS.get(policy, policy)
    draft.put("roles", [{"name": EVALUATOR, "replicas": evaluator.count, "template": template}])
