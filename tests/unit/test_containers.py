"""Dockerfile, kubernetes.yaml and skypilot.yaml, as far as no container engine is needed."""

import tomllib

import kubernetes_validate
import yaml
from helpers.commands import REPOSITORY, completed, finish
from helpers.image import image_files, instructions

from shardtune.cluster.environment import DEFAULTS

OBJECTS = list(yaml.safe_load_all((REPOSITORY / "examples/kubernetes.yaml").read_text("utf-8")))
SERVICE, JOB = OBJECTS
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_kubernetes_knows_every_field():
    for each in OBJECTS:  # by the oldest version with a stable podFailurePolicy
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_the_pods_find_node_0_and_their_ranks():
    name, spec = JOB["metadata"]["name"], JOB["spec"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    environment = {each["name"]: each for each in CONTAINER["env"]}
    assert environment["MASTER_ADDR"]["value"] == f"{name}-0.{POD['subdomain']}"
    rank = environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert rank == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert spec["completionMode"] == "Indexed"
    assert int(environment["NNODES"]["value"]) == spec["completions"] == spec["parallelism"]
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert int(environment["GPUS_PER_NODE"]["value"]) == gpus
    assert environment.keys() - {"POD_IP"} <= {*DEFAULTS, "JOIN_TIMEOUT", "JOIN_SECRET"}
    assert environment["JOIN_SECRET"]["valueFrom"].keys() == {"secretKeyRef"}
    mounted = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert mounted.keys() == volumes.keys()
    (memory,) = [name for name, path in mounted.items() if path == "/dev/shm"]
    assert volumes[memory]["emptyDir"]["medium"] == "Memory"


def test_a_refusal_fails_the_job_and_a_stop_after_a_save_does_not_count():
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert POD["restartPolicy"] == "Never" and POD["terminationGracePeriodSeconds"] > 600


OF_A_NODE = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}
TASK = yaml.safe_load((REPOSITORY / "examples/skypilot.yaml").read_text("utf-8"))


def test_skypilots_variables_become_those_of_the_launch_script(tmp_path):
    """Beside a Python of SkyPilot's own, which the launch script must not take."""
    script = tmp_path / "launch_node0.sh"
    script.write_text("#!/bin/sh\nenv; echo ARGUMENTS=$*\n")
    script.chmod(0o755)
    given = OF_A_NODE | {"PATH": "/usr/bin:/bin", "CONDA_PREFIX": "/skypilot"} | TASK["envs"]
    given["JOIN_SECRET"] = "x"  # its value is given to the command
    assert TASK["secrets"] == {"JOIN_SECRET": None}
    home = dict(instructions())["WORKDIR"]
    assert f"cd {home} " in TASK["run"]
    command = TASK["run"].replace(home, str(tmp_path))
    said = finish(completed(["bash", "-c", command], env=given))
    seen = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    expected = {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "NNODES": "2", "GPUS_PER_NODE": "8"}
    assert seen.items() >= expected.items() and "CONDA_PREFIX" not in seen
    named = {*DEFAULTS, "JOIN_TIMEOUT", "JOIN_SECRET"}
    assert {*TASK["envs"], *TASK["secrets"], *expected} <= named
    assert TASK["num_nodes"] == 2 and TASK["resources"]["accelerators"].endswith(":8")
    # Not 2, which the same command gives again.
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert f"run.dir={min(TASK['volumes'])}/" in TASK["run"]
    assert seen["ARGUMENTS"].startswith("--config ")


def test_the_image_has_a_python_that_ci_tests_and_the_pinned_requirements():
    steps = instructions()
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" .ci/run")
    (python,) = [
        s["with"]["python-version"] for s in job["steps"] if "python-version" in s.get("with", {})
    ]
    assert ("FROM", f"python:{python}-slim-bookworm") in steps
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={python}"
    assert any(name == "RUN" and text.endswith(" -r requirements.txt") for name, text in steps)
    # `test_documentation.py` runs from these alone.
    assert [name for name in image_files() if not (REPOSITORY / name).exists()] == []
