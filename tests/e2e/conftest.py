"""The cluster under the end-to-end tests: ours, or the one that REGROUP_CONTEXT names.

Brings up what is not up and takes down only what it brought up; then nothing of it may be left on the machine. What the
machine lacks fails the tests with a sentence.
"""

import shutil
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import host, images, lifecycle, paths
from cluster.kubectl import Kubectl
from cluster.settings import Settings
from harness import installation, traced_job
from harness.traced_job import TracedJob
from tests.e2e import machine
from tests.e2e.kit import Cluster, Power
from tests.e2e.samples import Samples
from tests.e2e.shared import SharedJobs

_FAILED: pytest.StashKey[set[str]] = pytest.StashKey()
"""The tests that have failed in this session, by their ids: in a fixture or in the test itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first, among the tests of this directory, what runs beside the samples, and then what the samples have come to.

    The tests after them switch nodes off, kill operators, or have bounds.
    """

    def place(item: pytest.Item) -> int:
        fixtures = getattr(item, "fixturenames", ())
        return 0 if "beside_samples" in fixtures else 1 if item.path.name == "test_samples.py" else 2

    ours = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for index, item in zip(ours, sorted((items[index] for index in ours), key=place), strict=True):
        items[index] = item


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of failed tests."""
    config.stash[_FAILED] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember which tests fail: the jobs that they shared are replaced."""
    report = yield
    if report.failed:
        item.config.stash[_FAILED].add(item.nodeid)
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with three nodes that are Ready."""
    context = lifecycle.context()
    if context:
        yield Cluster(Kubectl(None, context=context), context)
        return
    if lifecycle.is_up():
        lifecycle.up(Settings())
        yield Cluster(Kubectl(paths.kubeconfig()), None)
        return
    lifecycle.down()  # what a run that was killed may have left
    host.check()  # installs packages, which stay
    before = machine.snapshot()
    lifecycle.up(Settings())
    yield Cluster(Kubectl(paths.kubeconfig()), None)
    lifecycle.down()
    left = machine.snapshot() - before
    assert not left, "`python -m cluster down` left this behind:\n" + "\n".join(sorted(left))


@pytest.fixture(scope="session")
def own_cluster(cluster: Cluster) -> Cluster:
    """The cluster if it is ours; in another one the test fails with a sentence."""
    if cluster.context is not None:
        pytest.fail(
            f"REGROUP_CONTEXT={cluster.context} names an existing cluster. This test signals its containers from this machine, "
            "shares directories with its pods or switches its nodes off, which needs our own: unset REGROUP_CONTEXT.",
            pytrace=False,
        )
    return cluster


@pytest.fixture(scope="session")
def trainer_image(cluster: Cluster) -> str:
    """The name of the trainer's image, built from the tree as it is and present on every node."""
    return _image("trainer", cluster)


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster) -> str:
    """The name of the operator's image, built from the tree as it is and present on every node."""
    return _image("operator", cluster)


@pytest.fixture(scope="session")
def torch_image(cluster: Cluster) -> str:
    """The name of an image with Python and torch, without pip and anything of ours, present on every node."""
    return _image("torch", cluster)


@pytest.fixture
def restricted_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own that enforces Pod Security "restricted"; deleted afterwards."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    cluster.kubectl.run("delete", "namespace", name, "--wait=false")


def _image(name: str, cluster: Cluster) -> str:
    if cluster.context is None:
        lifecycle.build_images([name])
    return images.recipe(name).name


@pytest.fixture(scope="session")
def operator(own_cluster: Cluster, trainer_image: str, operator_image: str) -> Iterator[Kubectl]:  # noqa: ARG001
    """The operator, installed through its chart with two replicas, running the tree as it is."""
    installation.install(own_cluster.kubectl)
    yield own_cluster.kubectl
    for item in own_cluster.kubectl.get("namespaces")["items"]:
        namespace = item["metadata"]["name"]
        if namespace.startswith("train-"):
            installation.remove_namespace(own_cluster.kubectl, namespace)
    for volumes in (paths.cache() / "volumes").glob("train-*"):
        shutil.rmtree(volumes, ignore_errors=True)


@pytest.fixture
def jobs(operator: Kubectl, train_namespace: str) -> Callable[..., TracedJob]:
    """A function that starts a traced job (see traced_job.start) in a restricted namespace of the test's own."""

    def start(name: str = "digits", **options: Any) -> TracedJob:
        return traced_job.start(operator, train_namespace, name, **options)

    return start


@pytest.fixture
def train_namespace(operator: Kubectl) -> Iterator[str]:
    """A namespace of the test's own for jobs, that enforces Pod Security "restricted"; nobody waits for its end."""
    yield from _train_namespace(operator)


@pytest.fixture(scope="module")
def shared_namespace(operator: Kubectl) -> Iterator[str]:
    """Such a namespace for the jobs of a whole file."""
    yield from _train_namespace(operator)


def _train_namespace(operator: Kubectl) -> Iterator[str]:
    namespace = f"train-{uuid.uuid4().hex[:8]}"
    installation.namespace(operator, namespace)
    yield namespace
    installation.remove_namespace(operator, namespace)


@pytest.fixture(scope="session")
def jobs_of_session(operator: Kubectl, pytestconfig: pytest.Config) -> SharedJobs:
    """The jobs that tests share, none of them started."""
    namespace = f"train-{uuid.uuid4().hex[:8]}"
    installation.namespace(operator, namespace)
    failed = pytestconfig.stash[_FAILED]
    return SharedJobs(operator, namespace, failed)


@pytest.fixture
def shared_jobs(jobs_of_session: SharedJobs, request: pytest.FixtureRequest) -> SharedJobs:
    """The jobs that tests share; those that this test takes are its own from now on."""
    jobs_of_session.test = request.node.nodeid
    return jobs_of_session


@pytest.fixture(scope="session")
def power(own_cluster: Cluster) -> Iterator[Power]:  # noqa: ARG001
    """The nodes' power switches; all nodes are Ready in the end."""
    switches = Power()
    yield switches
    switches.all_on()


@pytest.fixture(scope="session")
def samples(operator: Kubectl) -> Iterator[Samples]:
    """The runs of the two samples, begun together."""
    runs = Samples(operator)
    yield runs
    runs.remove()


@pytest.fixture(scope="session")
def beside_samples(request: pytest.FixtureRequest) -> None:
    """The samples run, if a test of this session will ask for them."""
    if any("samples" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("samples")


@pytest.fixture
def nothing_shared(shared_jobs: SharedJobs) -> None:
    """The shared jobs have ended: this test's job has the machine to itself."""
    shared_jobs.end()
