"""Golden: the environment that the operator writes into a pod is the one that the agent reads; the trainer's likewise.

The names are read from the code itself, so that neither side can invent one alone.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from regroup.protocol import env
from regroup_operator.api import parse_job
from regroup_operator.api.template import ALLOWED_ENV, RESERVED_ENV, RESERVED_ENV_PREFIXES
from regroup_operator.render import RenderSettings
from regroup_operator.render.pod import worker_pod
from tests.builders.jobs import stored_job
from tests.unit.agent.python39 import oldest_python

ROOT = Path(__file__).parents[3]
AGENT = ROOT / "trainer-image/_regroup_agent"
LIBRARY = ROOT / "trainer-image/regroup"
NAMES = {
    name: value
    for name, value in vars(env).items()
    if name.isupper() and isinstance(value, str) and name != "DEFAULT_PRELOAD"
}


def used(*places: Path) -> set[str]:
    """Return the variables (values) of `env` that the sources name as env.NAME."""
    text = "\n".join(path.read_text() for place in places for path in sorted(place.rglob("*.py")))
    return {NAMES[name] for name in re.findall(r"\benv\.([A-Z_]+)\b", text) if name in NAMES}


def rendered() -> set[str]:
    """Return the variables that a rendered worker has, with everything a job can ask for."""
    job = parse_job(
        stored_job(
            workersPerGroup=3,
            elasticPolicy={"minReplicas": 3, "maxReplicas": 6},
            checkpoint={"volumeClaim": "ckpt"},
            memorySnapshot={"sizeLimit": "1Gi"},
            recovery={"maxRestarts": 3, "gracefulStop": {"signal": "SIGUSR1"}},
            progress={"log": "(?P<step>[0-9]+)"},
        )
    )
    pod = worker_pod(job, 0, 0, settings=RenderSettings(operator_url="https://regroup.ns.svc:8443", agent_image="a:1"))
    trainer = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
    return {variable["name"] for variable in trainer["env"]}


def test_what_render_writes_is_what_agent_and_library_read() -> None:
    read = used(AGENT) | used(LIBRARY) | {env.JOB_NAME}
    assert rendered() <= read, "written for nobody"
    of_pod = {v for v in vars_between("pod -> agent", "agent -> trainer") if v not in (env.PRELOAD,)}
    assert of_pod <= rendered(), "read by the agent and written by nobody"


def test_every_name_is_used() -> None:
    everywhere = used(AGENT, LIBRARY, ROOT / "operator")
    assert set(NAMES.values()) - everywhere == set()


def test_all_of_our_names_are_reserved_for_users() -> None:
    for value in NAMES.values():
        reserved = value in env.RESERVED or value.startswith(env.RESERVED_PREFIXES)
        assert reserved or value in env.ALLOWED
    assert set(env.RESERVED) == RESERVED_ENV
    assert env.RESERVED_PREFIXES == RESERVED_ENV_PREFIXES
    assert set(env.ALLOWED) == ALLOWED_ENV


def vars_between(first: str, last: str) -> set[str]:
    """Return the values that env.py lists between two of its headings."""
    text = (ROOT / "trainer-image/regroup/protocol/env.py").read_text()
    part = text[text.index(f"# --- {first}") : text.index(f"# --- {last}")]
    return {NAMES[name] for name in re.findall(r"^([A-Z_]+) = ", part, re.MULTILINE)}


def test_protocol_is_importable_in_the_oldest_python_of_a_training_image() -> None:
    """Standard library only."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from regroup.protocol import codec, document, env, local, state, wire;"
        "seal = state.Seal(1, state.StatePair(1, 2), 1);"
        "r = wire.Report('j', 'p', 'b', state.Condition(1, 2, 'ready'), seal, 5, wire.Changed());"
        "assert wire.Report.decode(codec.line(r)) == r;"
        "ours = {m.split('.')[0] for m in sys.modules} - set(getattr(sys, 'stdlib_module_names', ()));"
        "assert not {'torch', 'numpy', 'pydantic', 'aiohttp'} & ours, ours; print('ok')"
    )
    done = subprocess.run(
        [oldest_python(), "-I", "-S", "-c", code, str(ROOT / "trainer-image")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
