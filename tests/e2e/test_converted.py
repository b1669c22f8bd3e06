"""A job of another operator, converted by `regroup convert`, on real pods."""

from __future__ import annotations

import yaml

from cluster.kubectl import Kubectl
from harness.job import JobView
from harness.traced_job import IMAGE
from regroup_cli.convert.documents import Options, convert, read_documents

PYTORCHJOB = f"""
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: converted}}
spec:
  nprocPerNode: "2"
  runPolicy: {{cleanPodPolicy: None, backoffLimit: 3}}
  pytorchReplicaSpecs:
    Master: &replicas
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
          volumes: [{{name: data, emptyDir: {{}}}}]
          containers:
            - name: pytorch
              image: {IMAGE}
              command: [bash, -xc]
              args:
                - |
                  torchrun --nnodes=$PET_NNODES --node_rank=$RANK --master_addr=$MASTER_ADDR \\
                    /regroup-samples/script.py --checkpoint /data/script.pt --steps $STEPS
              env: [{{name: STEPS, value: "60"}}, {{name: OMP_NUM_THREADS, value: "1"}}]
              volumeMounts: [{{name: data, mountPath: /data}}]
              securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
    Worker: *replicas
"""


def test_converted_pytorchjob_runs_to_its_end(operator: Kubectl, train_namespace: str) -> None:
    (found,) = convert(read_documents(PYTORCHJOB, "job.yaml"), Options())
    assert found.dropped == 0, yaml.safe_dump(found.document)
    found.document["metadata"]["namespace"] = train_namespace
    operator.apply(found.document)
    job = JobView(operator, train_namespace, "converted")
    job.wait(180, "the converted job ends", state="Succeeded")
    names = [pod["metadata"]["name"] for pod in job.pods()]
    logs = "".join(
        operator.run(f"--namespace={train_namespace}", "logs", name, "--container=pytorch") for name in names
    )
    assert [f"rank {rank} finished step 60" in logs for rank in range(4)] == [True] * 4, logs
